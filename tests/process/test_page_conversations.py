"""The chat in a headless Chromium: conversations that are kept, edited, refused, dropped on."""

import json
import re
from typing import Any

import pytest

from tests.fake_generator import FakeGenerator
from tests.page_server import KEY, open_page, server_fixture
from tests.process.test_page_in_browser import send
from tests.serving import Server

# The default check has test_page_in_browser.py and test_page_modules.py.
pytestmark = pytest.mark.matrix

GENERATOR = FakeGenerator()
SEER = {
    "id": "seer",
    "root": "seer",
    "serves": "generation",
    "input_modalities": ["text", "image", "audio", "video"],
}
DROP = """([selector, name, type]) => {
    const transfer = new DataTransfer();
    const content = `<svg xmlns='http://www.w3.org/2000/svg' id='${name}'/>`;
    transfer.items.add(new File([content], name, {type}));
    const event = {dataTransfer: transfer, bubbles: true, cancelable: true};
    const target = document.querySelector(selector);
    target.dispatchEvent(new DragEvent("dragover", event));
    return !target.dispatchEvent(new DragEvent("drop", event));
}"""
KEPT = """async text => {
    const { listConversations, loadConversation } = await import("./assets/store.js");
    const [newest] = await listConversations();
    return newest && JSON.stringify(await loadConversation(newest.id)).includes(text);
}"""


server = server_fixture(GENERATOR)


def composer(page: Any) -> Any:
    return page.get_by_label("Message", exact=True)


def answer(page: Any, text: str) -> Any:
    """Send a message; return the element of its whole response."""
    response = send(page, text)
    response.get_by_text("out ·").wait_for()
    return response


def history() -> list[str]:
    """Return the texts of the last request."""
    payload: Any = GENERATOR.payloads[-1]
    return [message["content"] for message in payload.prompt.messages]


def test_conversations_survive_a_reload_and_can_be_opened_and_deleted(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be kind.")
    answer(page, "say *hm one")
    page.wait_for_function(KEPT, arg='" one"')
    page.reload()
    page.locator("article.assistant .content").get_by_text("one").wait_for()
    page.locator("details.reasoning").wait_for()
    answer(page, "say two")
    assert history() == ["Be kind.", "say *hm one", " one", "say two"]
    page.get_by_role("button", name="New chat").click()
    answer(page, "say three")
    page.get_by_role("button", name="Conversations").click()
    dialog = page.get_by_role("dialog", name="Conversations")
    dialog.get_by_role("button", name=re.compile("^say three")).wait_for()
    dialog.get_by_role("button", name=re.compile(r"^say \*hm one")).click()
    page.locator("article.user").nth(1).get_by_text("say two").wait_for()
    page.get_by_role("button", name="Conversations").click()
    dialog.get_by_role("button", name="Delete say *hm one").click()
    dialog.get_by_role("listitem").nth(1).wait_for(state="detached")
    page.on("dialog", lambda question: question.accept())
    dialog.get_by_role("button", name="Delete all").click()
    dialog.get_by_role("listitem").wait_for(state="detached")
    dialog.get_by_role("button", name="Close").click()
    page.reload()
    page.get_by_role("heading", name="What shall we talk about?").wait_for()


@pytest.mark.parametrize(
    "forbid",
    [
        "for (const name of ['indexedDB', 'sessionStorage', 'localStorage']) "
        "Object.defineProperty(window, name, "
        "{get() { throw new DOMException('forbidden', 'SecurityError'); }});",
        "IDBFactory.prototype.open = () => { const request = new EventTarget(); "
        "setTimeout(() => request.onerror?.()); return request; };",
    ],
    ids=["blocked", "failing"],
)
def test_a_forbidden_store_does_not_stop_the_chat(
    visitor: Any, server: Server, forbid: str
) -> None:
    visitor.add_init_script(forbid)
    visitor.goto(server.url)
    field = visitor.get_by_role("textbox", name="API key")
    if "EventTarget" in forbid or field.is_visible():
        field.wait_for()
    field.fill(KEY)
    visitor.keyboard.press("Enter")
    visitor.problems.ignore_status(401)
    answer(visitor, "say one")
    answer(visitor, "say two")
    assert history() == ["say one", "one", "say two"]
    visitor.get_by_role("button", name="Conversations").click()
    visitor.get_by_text("does not let the page keep conversations").wait_for()
    visitor.get_by_role("button", name="Close").click()


def test_the_store_is_bounded(page: Any) -> None:
    kept = page.evaluate(
        """async () => {
            const store = await import("./assets/store.js");
            await Promise.all(Array.from({length: 103}, (_, n) => store.saveConversation(
                {id: `${n}`, title: "", messages: [], settings: {}})));
            const large = {id: "large", title: "", messages: ["x".repeat(51e6)], settings: {}};
            const kept = await store.saveConversation(large);
            const gone = await store.loadConversation("large");
            return [(await store.listConversations()).length, kept, gone ?? null];
        }"""
    )
    assert kept == [100, False, None]


def test_a_message_is_edited_and_an_answer_regenerated(page: Any) -> None:
    answer(page, "say one")
    answer(page, "say two")
    composer(page).fill("a draft")
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    assert composer(page).input_value() == "say one"
    page.keyboard.press("Escape")
    assert composer(page).input_value() == "a draft"
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    answer(page, "say three")
    assert history() == ["say three"]
    assert composer(page).input_value() == "a draft"
    assert page.locator("#chat article").count() == 2
    before = len(GENERATOR.payloads)
    page.get_by_role("button", name="Regenerate").click()
    page.locator("article.assistant").get_by_text("out ·").wait_for()
    assert len(GENERATOR.payloads) == before + 1
    assert history() == ["say three"]
    assert page.locator("#chat article").count() == 2


def test_a_refused_text_stays_in_the_composer_and_the_history_as_it_was(page: Any) -> None:
    answer(page, "say one")
    send(page, "refused").get_by_role("alert").wait_for()
    page.problems.ignore_status(400)
    assert composer(page).input_value() == "refused"
    assert page.locator("article.user").count() == 1
    page.locator("article.user").get_by_role("button", name="Edit").click()
    send(page, "refused").get_by_role("alert").wait_for()
    page.problems.ignore_status(400)
    assert composer(page).input_value() == "refused"
    first = page.locator("article.assistant").first
    assert first.locator(".content").inner_text() == "one"
    assert first.get_by_text("out ·").is_visible(), "and with its figures"
    page.get_by_role("button", name="Cancel").click()
    answer(page, "say two")
    assert history() == ["say one", "one", "say two"]


def test_messages_and_code_are_copied_with_and_without_a_clipboard(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.clock.install()
    answer(page, "say ```py\nx&nbsp;= 1\n```")
    for hidden in (False, True):
        if hidden:  # as on plain http://
            page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.locator("article.user").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        page.clock.run_for(2000)
        page.locator(".code").get_by_role("button", name="Copy code").click()
        page.get_by_role("button", name="Copied").wait_for()
        page.clock.run_for(2000)
        if not hidden:
            copied = page.evaluate("navigator.clipboard.readText()")
            assert copied == "x&nbsp;= 1"


def test_a_tool_of_an_example_leaves_with_the_conversation(page: Any) -> None:
    page.get_by_role("button", name="What is the weather in Paris?").click()
    page.get_by_text("out ·").wait_for()
    assert "get_weather" in page.get_by_label("Tools").input_value()
    page.get_by_role("button", name="New chat").click()
    assert page.get_by_label("Tools").input_value() == ""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "mine"}}]')
    answer(page, "hi")
    page.get_by_role("button", name="New chat").click()
    assert "mine" in page.get_by_label("Tools").input_value(), "only an example's leaves"


def test_an_image_dropped_anywhere_is_attached(visitor: Any, server: Server) -> None:
    visitor.route("**/models", lambda route: route.fulfill(json={"data": [SEER]}))
    page = open_page(visitor, server)
    for n, selector in enumerate(("body", "#chat .welcome", "#chat-text")):
        assert page.evaluate(DROP, [selector, f"{n}.svg", "image/svg+xml"]), "or it is opened"
        page.get_by_role("button", name=f"Remove {n}.svg").wait_for()
    assert page.evaluate(DROP, ["body", "a.pdf", "application/pdf"])
    page.get_by_text("Only images, recordings, videos can be attached").wait_for()
    page.get_by_role("tab", name="Live").click()
    assert page.evaluate(DROP, ["body", "3.svg", "image/svg+xml"]), "on other tabs too"
    page.get_by_role("tab", name="Chat").click()
    assert page.get_by_role("button", name="Remove").count() == 3
    assert page.evaluate(DROP, ["body", "talk.wav", "audio/wav"])
    assert page.evaluate(DROP, ["body", "walk.mp4", "video/mp4"])
    done = {"content_type": "text/event-stream", "body": "data: [DONE]\n\n"}
    visitor.route("**/chat/completions", lambda route: route.fulfill(**done))
    with page.expect_request("**/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    *_, sound, video = sent.value.post_data_json["messages"][-1]["content"]
    assert sound["audio_url"]["url"].startswith("data:audio/wav;base64,")
    assert video["video_url"]["url"].startswith("data:video/mp4;base64,")
    page.get_by_text("talk.wav").wait_for()
    page.get_by_text("walk.mp4").wait_for()


def test_a_text_model_refuses_images_with_a_reason(page: Any) -> None:
    assert page.evaluate(DROP, ["body", "a.svg", "image/svg+xml"])
    page.get_by_text("This model takes no files.").wait_for()
    assert page.get_by_role("button", name="Remove").count() == 0


def test_tables_scroll_on_a_small_screen_and_words_stay_whole(page: Any) -> None:
    words = [f"incomprehensibilities{n}" for n in range(5)]
    row = f"| {' | '.join(words)} |"
    response = answer(page, f"say {row}\n|{'---|' * 5}\n{row}")
    scroll = response.locator(".scroll")
    assert scroll.evaluate("node => node.scrollWidth > node.clientWidth")
    lines = "node => node.getClientRects().length && node.clientHeight < 60"
    assert all(cell.evaluate(lines) for cell in response.locator("td").all())
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wider) == 0


def test_running_work_shows(page: Any) -> None:
    page.clock.install()
    GENERATOR.gate.clear()
    send(page, "say one").get_by_text("Waiting for the first token").wait_for()
    page.clock.run_for(3100)
    page.get_by_text("Waiting for the first token… 3 s").wait_for()
    tab = page.get_by_role("tab", name="Chat")
    assert tab.get_attribute("data-running") is not None
    GENERATOR.release()
    page.locator(".content").get_by_text("one").wait_for()
    page.get_by_role("button", name="Send").wait_for()
    assert tab.get_attribute("data-running") is None


def test_cards_have_scales(page: Any) -> None:
    answer(page, "hi")
    page.get_by_role("tab", name="Live").click()
    share = page.locator(".card", has_text="Cache in use")
    share.get_by_text("100 %").wait_for()
    chart = page.locator(".card", has_text="Latency p95").locator(".chart")
    assert re.fullmatch(r"[\d.]+ m?s\s*0", chart.inner_text().strip())
    assert json.dumps("NaN") not in page.locator(".cards").inner_html()
