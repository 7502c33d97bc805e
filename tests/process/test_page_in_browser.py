"""The page in a headless Chromium: chat, stop, errors, the API key, keyboard, small screens."""

import contextlib
import io
import json
from typing import Any

import pytest

from tests.fake_generator import FakeGenerator
from tests.page_server import KEY, run_shell, server_fixture
from tests.serving import Server, wait_until
from worker.messages.generation import SamplingDefaults

TABS = ["Chat", "Pipeline", "Embeddings", "Live"]
GENERATOR = FakeGenerator()


server = server_fixture(GENERATOR)


def last_messages() -> Any:
    """Return the messages of the last request."""
    payload: Any = GENERATOR.payloads[-1]
    return payload.prompt.messages


def send(page: Any, text: str) -> Any:
    """Send a message; return the element of the response."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator("article.assistant").last


def test_a_chat_shows_reasoning_and_markdown_and_keeps_its_history(page: Any) -> None:
    response = send(page, "say *hm (**bold**) and <img src=x onerror=alert(1)> `code`")
    response.get_by_text("out ·").wait_for()
    content = response.locator(".content")
    assert content.inner_text() == "(bold) and <img src=x onerror=alert(1)> code"
    assert content.locator("strong").inner_text() == "bold"
    assert content.locator("img").count() == 0
    reasoning = response.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    assert reasoning.locator("p").text_content() == "hm"
    send(page, "again").get_by_text("Hello there, wörld!").wait_for()
    roles = [message["role"] for message in last_messages()]
    assert roles == ["user", "assistant", "user"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#chat article").count() == 0


def test_the_request_is_shown_as_json_curl_and_python(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill('It\'s "so" $HOME `x`\\n')
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("0")
    page.get_by_label("Reasoning").select_option("low")
    response = send(page, "hi")
    response.get_by_text("cut at max tokens").wait_for()
    response.get_by_text("Request and response").click()

    def shown(view: str) -> str:
        response.get_by_role("button", name=view, exact=True).click()
        return str(response.locator(".exchange pre").text_content())

    request = json.loads(shown("Request"))
    assert (request["temperature"], request["max_tokens"], request["stream"]) == (0.5, 3, True)
    assert (request["reasoning_effort"], request["seed"]) == ("low", 0)
    assert request["messages"][0] == {"role": "system", "content": 'It\'s "so" $HOME `x`\\n'}
    whole = json.loads(shown("Response"))
    assert whole["choices"][0]["message"]["content"] == "Hello there,"
    assert whole["usage"]["completion_tokens"] == 3
    curl = shown("curl")
    assert KEY not in curl
    assert run_shell(curl).count(" there") == 1
    assert last_messages()[0] == request["messages"][0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", KEY)
        exec(shown("Python"), {})
    assert printed.getvalue() == "Hello there,"
    assert last_messages()[0] == request["messages"][0]


def test_a_model_without_sampling_settings_gets_those_of_the_page(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings show the numbers. The API's defaults are others."""

    def sampling(**settings: str) -> tuple[float | None, float | None]:
        page.get_by_role("button", name="Settings").click()  # a message closes them
        for label, value in settings.items():
            page.get_by_label(label.replace("_", " ")).fill(value)
        send(page, "hi").get_by_text("out ·").wait_for()
        sampling = GENERATOR.payloads[-1].sampling
        return sampling.temperature, sampling.top_p

    def shown() -> list[str]:
        fields = (page.get_by_label(label) for label in ("Temperature", "Top p"))
        return [field.get_attribute("placeholder") for field in fields]

    assert shown() == ["0.7 (model)", "0.8 (model)"]
    assert sampling() == (None, None)
    monkeypatch.setattr(FakeGenerator, "defaults", SamplingDefaults())
    page.reload()
    page.get_by_role("tab", name="Live").wait_for()
    assert shown() == ["0.7 (page)", "0.95 (page)"]
    assert sampling() == (0.7, 0.95)
    assert sampling(Temperature="0", Top_p="0.5") == (0.0, 0.5)
    assert sampling(Temperature="1", Top_p="") == (1.0, 0.95)


def test_the_sampling_settings_of_a_model_are_known_once_it_is_loaded(
    visitor: Any, server: Server
) -> None:
    model: dict[str, Any] = {"id": "demo", "root": "demo", "serves": "generation"}
    listed = [{**model}, {**model, "sampling_defaults": {"configured": False}}]
    visitor.route("**/models", lambda route: route.fulfill(json={"data": [listed.pop(0)]}))
    visitor.add_init_script(f"sessionStorage.setItem('onequeue-key', '{KEY}')")
    visitor.goto(server.url)
    for placeholder in ("model default", "0.7 (page)"):
        known = visitor.locator(f"input[name=temperature][placeholder='{placeholder}']")
        known.wait_for(state="attached")
        send(visitor, "hi")


def test_escape_aborts_the_response_on_the_server_too(page: Any) -> None:
    before = GENERATOR.dropped.count("long")
    response = send(page, "long")
    response.get_by_text("w3 ").wait_for()
    assert page.get_by_role("button", name="Send").is_hidden()
    page.keyboard.press("Escape")
    response.get_by_text("stopped").wait_for()
    wait_until(lambda: GENERATOR.dropped.count("long") == before + 1)
    send(page, "and now").get_by_text("Hello there").wait_for()
    content = last_messages()[1]["content"]
    assert content.startswith("w0 w1 w2 w3"), "the text before the stop stays in the history"


def test_the_result_of_a_tool_call_is_sent(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    tools = [{"type": "function", "function": {"name": "weather"}}]
    page.get_by_label("Tools").fill(json.dumps(tools))
    response = send(page, 'say !weather ={"city":"Paris"}')
    response.get_by_text('weather({"city":"Paris"})').wait_for()
    page.get_by_label("weather returns").fill("sunny")
    page.keyboard.press("Enter")
    page.locator("article.assistant").nth(1).get_by_text("Hello there").wait_for()
    call, result = last_messages()[1:]
    assert result["content"] == "sunny"
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_a_stopped_call_is_left_out_of_the_history(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    GENERATOR.one_by_one = True
    response = send(page, "say !weather ={ =}")
    GENERATOR.permits.release(2)
    response.get_by_text("weather({").wait_for()
    page.keyboard.press("Escape")
    response.get_by_text("stopped").wait_for()
    GENERATOR.release()
    send(page, "and now").get_by_text("Hello there").wait_for()
    assert [message["content"] for message in last_messages()] == ["and now"]


def test_an_error_shows_the_servers_message(page: Any) -> None:
    response = send(page, "refused")
    alert = response.get_by_role("alert")
    alert.get_by_text("this prompt is refused").wait_for()
    assert "400" in alert.inner_text()
    page.problems.ignore_status(400)
    alert.get_by_role("button", name="Try again").click()
    page.locator("article.assistant").get_by_text("this prompt is refused").wait_for()
    assert page.locator("article.assistant").count() == 1
    page.problems.ignore_status(400)
    send(page, "say fine").get_by_text("fine").wait_for()
    assert [message["content"] for message in last_messages()] == ["say fine"], (
        "or every request would fail"
    )


def test_a_failure_in_the_middle_keeps_the_text_so_far(page: Any) -> None:
    response = send(page, "bad later")
    response.get_by_role("alert").get_by_text("the model failed").wait_for()
    assert response.locator(".content").inner_text().startswith("w0")


def test_metrics_are_read_only_while_their_tab_is_open(page: Any) -> None:
    send(page, "hello").get_by_text("out ·").wait_for()
    page.clock.install()
    page.reload()
    page.get_by_role("tab", name="Live").click()
    page.locator("#live tbody tr", has_text="/v1/chat/completions").wait_for()
    titles = page.locator(".card h3").all_inner_texts()
    assert {"Queue", "Batch size", "Tokens/s", "Latency p95", "Cache in use"} <= set(titles)
    for _ in range(2):
        with page.expect_response("**/metrics"):
            page.clock.run_for(1100)
    urls: list[str] = []
    page.get_by_role("tab", name="Chat").click()
    page.on("request", lambda request: urls.append(request.url))
    page.clock.run_for(10_000)
    page.evaluate(
        "fetch('health').then(response => response.text())"
    )  # the requests before it have been reported
    names = [url.rsplit("/")[-1] for url in urls]
    assert "health" in names
    assert "metrics" not in names


def test_the_page_works_by_keyboard_and_on_a_small_screen(page: Any) -> None:
    assert page.get_by_role("tab").all_inner_texts() == TABS
    name = "organisation/a-model-of-a-very-long-name-" * 3
    page.locator("#state .text").evaluate("(words, name) => words.textContent = name", name)
    page.get_by_role("tab", name="Chat").focus()
    for name in [*TABS[1:], TABS[0]]:
        page.keyboard.press("ArrowRight")
        tab = page.get_by_role("tab", name=name)
        assert tab.get_attribute("aria-selected") == "true"
        assert tab.evaluate("tab => tab === document.activeElement")
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wider) == 0, name
    page.set_viewport_size({"width": 375, "height": 740})
    titles = page.locator("#rerank, #speech").evaluate_all(
        "sections => sections.map(section => section.dataset.title)"
    )
    last = page.get_by_role("tab").last
    for title in titles:  # with the tabs of all kinds
        tab = "Object.assign(tab.cloneNode(), {textContent: title})"
        last.evaluate(f"(tab, title) => tab.before({tab})", title)
    assert page.locator("nav").evaluate("nav => nav.scrollWidth - nav.clientWidth") == 0
    unnamed = "field => !field.labels.length && !field.ariaLabel"
    fields = f"[...document.querySelectorAll('input, textarea, select')].filter({unnamed}).length"
    assert page.evaluate(fields) == 0


def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(visitor: Any, server: Server) -> None:
    visitor.goto(server.url)
    field = visitor.get_by_role("textbox", name="API key")
    field.fill("wrong")
    visitor.problems.ignore_status(401)
    visitor.keyboard.press("Enter")
    visitor.get_by_text("The server does not accept this key.").wait_for()
    visitor.problems.ignore_status(401)
    field.fill(KEY)
    visitor.keyboard.press("Enter")
    send(visitor, "hello").get_by_text("Hello there").wait_for()
    visitor.reload()
    send(visitor, "hello").get_by_text("Hello there").wait_for()
    assert visitor.evaluate("localStorage.length") == 0
    assert visitor.context.cookies() == []
    other = visitor.context.new_page()
    other.goto(server.url)
    other.get_by_role("textbox", name="API key").wait_for()
    other.close()
