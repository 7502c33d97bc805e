"""The page in a headless Chromium: a chat, a stop, an error, a key; by keyboard and on a phone."""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_generator import FakeGenerator
from tests.page_server import KEY, run_shell, serving_all
from tests.serving import Server, wait_until

TABS = ["Chat", "Pipeline", "Embeddings", "Live"]
GENERATOR = FakeGenerator()


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    with serving_all(GENERATOR) as made:
        yield made


@pytest.fixture
def page(visitor: Any, server: Server) -> Any:
    """The page, with the key."""
    visitor.add_init_script(f"sessionStorage.setItem('onequeue-key', '{KEY}')")
    visitor.goto(server.url)
    visitor.get_by_role("tab", name="Live").wait_for()
    return visitor


def heard() -> Any:
    """The messages of the last request."""
    payload: Any = GENERATOR.payloads[-1]
    return payload.prompt.messages


def say(page: Any, text: str) -> Any:
    """The answer, which has begun."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator("article.assistant").last


def test_a_chat(page: Any) -> None:
    answer = say(page, "say *hm (**bold**) and <img src=x onerror=alert(1)> `code`")
    answer.get_by_text("out ·").wait_for()
    content = answer.locator(".content")
    assert content.inner_text() == "(bold) and <img src=x onerror=alert(1)> code"
    assert content.locator("strong").inner_text() == "bold"
    assert content.locator("img").count() == 0
    thoughts = answer.locator("details.thoughts")
    assert thoughts.get_attribute("open") is None
    assert thoughts.locator("p").text_content() == "hm"
    say(page, "again").get_by_text("Hello there, wörld!").wait_for()
    roles = [message["role"] for message in heard()]
    assert roles == ["user", "assistant", "user"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#chat article").count() == 0


def test_what_was_sent_and_the_same_to_type(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill('It\'s "so" $HOME `x`\\n')
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Thoughts").select_option("low")
    answer = say(page, "hi")
    answer.get_by_text("cut at max tokens").wait_for()
    answer.get_by_text("Request and answer").click()

    def shown(view: str) -> str:
        answer.get_by_role("button", name=view, exact=True).click()
        return str(answer.locator(".exchange pre").text_content())

    request = json.loads(shown("Request"))
    assert (request["temperature"], request["max_tokens"], request["stream"]) == (0.5, 3, True)
    assert request["reasoning_effort"] == "low"
    assert request["messages"][0] == {"role": "system", "content": 'It\'s "so" $HOME `x`\\n'}
    whole = json.loads(shown("Answer"))
    assert whole["choices"][0]["message"]["content"] == "Hello there,"
    assert whole["usage"]["completion_tokens"] == 3
    curl = shown("curl")
    assert KEY not in curl
    assert run_shell(curl).count(" there") == 1
    assert heard()[0] == request["messages"][0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", KEY)
        exec(shown("Python"), {})
    assert printed.getvalue() == "Hello there,"
    assert heard()[0] == request["messages"][0]


def test_escape_stops_an_answer_on_the_server_too(page: Any) -> None:
    before = GENERATOR.dropped.count("long")
    answer = say(page, "long")
    answer.get_by_text("w3 ").wait_for()
    assert page.get_by_role("button", name="Send").is_hidden()
    page.keyboard.press("Escape")
    answer.get_by_text("stopped").wait_for()
    wait_until(lambda: GENERATOR.dropped.count("long") == before + 1)
    say(page, "and now").get_by_text("Hello there").wait_for()
    said = heard()[1]["content"]
    assert said.startswith("w0 w1 w2 w3"), "what was said before the stop goes on"


def test_a_tool_is_called_and_its_result_handed_over(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    tools = [{"type": "function", "function": {"name": "weather"}}]
    page.get_by_label("Tools").fill(json.dumps(tools))
    answer = say(page, 'say !weather ={"city":"Paris"}')
    answer.get_by_text('weather({"city":"Paris"})').wait_for()
    page.get_by_label("weather returns").fill("sunny")
    page.keyboard.press("Enter")
    page.locator("article.assistant").nth(1).get_by_text("Hello there").wait_for()
    call, result = heard()[1:]
    assert result["content"] == "sunny"
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_a_call_that_was_stopped_leaves_no_trace(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    GENERATOR.one_by_one = True
    answer = say(page, "say !weather ={ =}")
    GENERATOR.single.release(2)
    answer.get_by_text("weather({").wait_for()
    page.keyboard.press("Escape")
    answer.get_by_text("stopped").wait_for()
    GENERATOR.release()
    say(page, "and now").get_by_text("Hello there").wait_for()
    assert [message["content"] for message in heard()] == ["and now"]


def test_an_error_is_told_as_the_server_words_it(page: Any) -> None:
    answer = say(page, "refused")
    alert = answer.get_by_role("alert")
    alert.get_by_text("this prompt is refused").wait_for()
    assert "400" in alert.inner_text()
    page.problems.ignore_status(400)
    alert.get_by_role("button", name="Try again").click()
    page.locator("article.assistant").get_by_text("this prompt is refused").wait_for()
    assert page.locator("article.assistant").count() == 1
    page.problems.ignore_status(400)
    say(page, "say fine").get_by_text("fine").wait_for()
    assert [message["content"] for message in heard()] == ["say fine"], "or it would fail for ever"


def test_a_failure_in_the_middle_leaves_what_was_said(page: Any) -> None:
    answer = say(page, "bad later")
    answer.get_by_role("alert").get_by_text("the model failed").wait_for()
    assert answer.locator(".content").inner_text().startswith("w0")


def test_what_the_server_does_is_asked_for_while_it_is_looked_at(page: Any) -> None:
    say(page, "hello").get_by_text("out ·").wait_for()
    page.clock.install()
    page.reload()
    page.get_by_role("tab", name="Live").click()
    page.locator("#live tbody tr", has_text="/v1/chat/completions").wait_for()
    titles = page.locator(".card h3").all_inner_texts()
    assert {"Queue", "Batch size", "Tokens/s", "Latency p95", "Cache in use"} <= set(titles)
    for _ in range(2):
        with page.expect_response("**/metrics"):
            page.clock.run_for(1100)
    asked: list[str] = []
    page.get_by_role("tab", name="Chat").click()
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(10_000)
    page.evaluate("fetch('health').then(answer => answer.text())")  # by then all have been told of
    names = [url.rsplit("/")[-1] for url in asked]
    assert "health" in names
    assert "metrics" not in names


def test_it_works_by_keyboard_and_on_a_phone(page: Any) -> None:
    assert page.get_by_role("tab").all_inner_texts() == TABS
    name = "organisation/a-model-of-a-very-long-name-" * 3
    page.locator("#state .words").evaluate("(words, name) => words.textContent = name", name)
    page.get_by_role("tab", name="Chat").focus()
    for name in [*TABS[1:], TABS[0]]:
        page.keyboard.press("ArrowRight")
        tab = page.get_by_role("tab", name=name)
        assert tab.get_attribute("aria-selected") == "true"
        assert tab.evaluate("tab => tab === document.activeElement")
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wider) == 0, name
    unnamed = "field => !field.labels.length && !field.ariaLabel"
    fields = f"[...document.querySelectorAll('input, textarea, select')].filter({unnamed}).length"
    assert page.evaluate(fields) == 0


def test_a_key_is_asked_for_and_kept_in_the_tab(visitor: Any, server: Server) -> None:
    visitor.goto(server.url)
    field = visitor.get_by_role("textbox", name="API key")
    field.fill("wrong")
    visitor.problems.ignore_status(401)
    visitor.keyboard.press("Enter")
    visitor.get_by_text("The server does not know this key.").wait_for()
    visitor.problems.ignore_status(401)
    field.fill(KEY)
    visitor.keyboard.press("Enter")
    say(visitor, "hello").get_by_text("Hello there").wait_for()
    visitor.reload()
    say(visitor, "hello").get_by_text("Hello there").wait_for()
    assert visitor.evaluate("localStorage.length") == 0
    assert visitor.context.cookies() == []
    other = visitor.context.new_page()
    other.goto(server.url)
    other.get_by_role("textbox", name="API key").wait_for()
    other.close()
