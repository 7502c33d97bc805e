"""The page's results of pipelines, embeddings and speech, in a headless Chromium."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.fake_generator import FakeGenerator
from tests.page_server import run_shell, server_fixture
from tests.serving import Server

SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='80' height='40'/>"

# The default check has test_page_in_browser.py.
pytestmark = pytest.mark.matrix


server = server_fixture(FakeGenerator())


def mock_models(visitor: Any, models: list[dict[str, Any]], **ready: Any) -> None:
    """Have the page see a server of other models, which are not served here."""
    visitor.route("**/models", lambda route: route.fulfill(json={"data": models}))
    if ready:
        status = {"status": "ready", **ready}
        visitor.route("**/ready", lambda route: route.fulfill(json=status))


def test_a_pipeline_shows_scores_as_bars(page: Any) -> None:
    page.get_by_role("tab", name="Pipeline").click()
    page.get_by_label("Text", exact=True).press("Enter")
    bars = page.locator("#pipeline .bars li")
    bars.first.wait_for()
    assert [bar.inner_text().split() for bar in bars.all()] == [
        ["paris", "90.0", "%"],
        ["rome", "10.0", "%"],
    ]
    assert page.get_by_text("batch of 1").is_visible()
    page.locator("#pipeline").get_by_text("Request and response").click()
    page.locator("#pipeline").get_by_role("button", name="curl").click()
    assert json.loads(run_shell(page.locator("#pipeline pre").text_content()))[0]["score"] == 0.9
    page.get_by_label("Text", exact=True).fill("refused")
    page.keyboard.press("Enter")
    page.locator("#pipeline").get_by_role("alert").get_by_text("this text is refused").wait_for()
    page.problems.ignore_status(400)


def test_embeddings_become_a_table(page: Any) -> None:
    page.get_by_role("tab", name="Embeddings").click()
    page.get_by_label("Texts, one per line").fill("a\nab\n\nb")
    page.keyboard.press("Control+Enter")
    rows = page.locator("#embeddings tbody tr")
    rows.first.wait_for()
    assert [row.locator("td").all_inner_texts() for row in rows.all()] == [
        ["1.00", "0.71", "0.00"],
        ["0.71", "1.00", "0.71"],
        ["0.00", "0.71", "1.00"],
    ]


def test_documents_are_ranked_where_a_reranker_is_served(visitor: Any, server: Server) -> None:
    sent: list[Any] = []

    def rank(route: Any) -> None:
        sent.append(route.request.post_data_json)
        scores = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
        route.fulfill(json={"results": scores})

    model = {"id": "ranker", "root": "ranker", "serves": "rerank"}
    mock_models(visitor, [model], rerank_model="ranker")
    visitor.route("**/v1/rerank", rank)
    visitor.goto(server.url)
    visitor.get_by_label("Query").fill("q")
    visitor.get_by_label("Documents, one per line").fill("a\n\nb")
    visitor.keyboard.press("Control+Enter")
    rows = visitor.locator("#rerank .bars li")
    rows.first.wait_for()
    assert [row.inner_text().split() for row in rows.all()] == [["b", "0.900"], ["a", "0.100"]]
    assert sent == [{"model": "ranker", "query": "q", "documents": ["a", "b"]}]
    assert visitor.get_by_role("tab").all_inner_texts() == ["Rerank", "Live"]


def test_another_model_is_chosen_and_its_load_is_shown(visitor: Any, server: Server) -> None:
    status = {"value": "loading", "stage": "weights", "progress": {"current": 1, "total": 4}}
    common = {"serves": "pipeline", "input_modalities": ["text"]}
    models = [
        {"id": "one", "root": "one", "tasks": ["fill-mask"], "status": {"value": "loaded"}},
        {"id": "a&b", "root": "a&b", "tasks": ["text-classification"], "status": status},
    ]
    waiting: list[Any] = []
    listing = [model | common for model in models]
    mock_models(visitor, listing, task="fill-mask", takes="text", mask_token="[MASK]")
    visitor.route("**/?model=a%26b", lambda route: waiting.append(route))
    visitor.goto(server.url)
    visitor.get_by_text("one · a&b").wait_for()
    visitor.locator("#pipeline").get_by_label("Model", exact=True).select_option("a&b")
    visitor.get_by_role("heading", name="Text classification").wait_for()
    visitor.get_by_label("Text", exact=True).fill("good")
    visitor.keyboard.press("Enter")
    visitor.get_by_text("a&b is loading (stage weights, 25 %)").wait_for()
    [route] = waiting
    assert route.request.post_data_json == {"inputs": "good"}
    status["value"] = "loaded"
    route.fulfill(json=[{"label": "fine", "score": 0.9}])
    visitor.locator("#pipeline .bars").get_by_text("fine").wait_for()
    visitor.get_by_text("one · a&b").wait_for()


def draw(page: Any, result: Any, **inputs: Any) -> Any:
    """Show a result in the page by results.js."""
    page.evaluate(
        """async ([result, inputs]) => {
            const { results } = await import("./assets/results.js");
            document.body.replaceChildren(...await results(result, inputs));
        }""",
        [result, inputs],
    )
    return page.locator("body")


def test_entities_are_highlighted_in_the_text(page: Any) -> None:
    entities = [
        {"entity": "B-PER", "word": "A", "start": 2, "end": 3, "score": 0.9},
        {"entity": "I-PER", "word": "##da", "start": 3, "end": 5, "score": 0.7},
        {"entity": "I-PER", "word": "King", "start": 6, "end": 10, "score": 0.8},
        {"entity_group": "LOC", "word": "Rom", "start": 14, "end": 17, "score": 0.8},
    ]
    shown = draw(page, entities, text="😀 Ada King in Rom.")
    assert shown.locator("mark").all_inner_texts() == ["Ada KingPER", "RomLOC"]
    assert shown.locator("mark").first.get_attribute("title") == "70.0 %"
    assert shown.text_content() == "😀 Ada KingPER in RomLOC."


def test_boxes_are_drawn_over_the_image(page: Any) -> None:
    box = {"xmin": 10, "ymin": 5, "xmax": 30, "ymax": 35}
    shown = draw(
        page, [{"label": "<b>cat", "score": 0.5, "box": box}], image=f"data:image/svg+xml,{SVG}"
    )
    assert shown.locator("svg").get_attribute("viewBox") == "0 0 80 40"
    rect = shown.locator("svg rect")
    assert [rect.get_attribute(name) for name in ("x", "y", "width", "height")] == [
        "10", "5", "20", "30",
    ]  # fmt: skip
    assert shown.locator("svg text").text_content() == "<b>cat 50.0 %"


def test_masks_are_laid_over_the_image(page: Any) -> None:
    """The left half of the mask is white."""
    halves = np.repeat(np.array([[255, 0]], np.uint8), [40, 40], axis=1).repeat(40, axis=0)
    mask = io.BytesIO()
    Image.fromarray(halves).save(mask, "PNG")
    segment = {"label": "cat", "score": 0.5, "mask": base64.b64encode(mask.getvalue()).decode()}
    shown = draw(page, [segment], image=f"data:image/svg+xml,{SVG}").locator("figure")
    assert page.locator(".legend").inner_text() == "cat 50.0 %"
    pixels = np.asarray(Image.open(io.BytesIO(shown.screenshot())).convert("RGB"), int)
    row = pixels[len(pixels) // 2]
    left, right = row[len(row) // 4], row[3 * len(row) // 4]
    assert np.abs(left - right).max() > 50


def test_other_results_are_shown_by_their_shape(page: Any) -> None:
    zero_shot = {"sequence": "a", "labels": ["x", "y"], "scores": [0.75, 0.25]}
    assert draw(page, zero_shot).locator(".bars li").count() == 2
    assert draw(page, []).inner_text() == "Nothing was found."
    assert draw(page, {"text": "spoken"}).inner_text() == "spoken"
    assert draw(page, [{"generated_text": "written"}]).inner_text() == "written"
    assert "60 more numbers" in draw(page, [list(range(64))]).inner_text()


def test_speech_is_recorded_and_sent(visitor: Any, server: Server) -> None:
    sent: list[bytes] = []

    def transcribe(route: Any) -> None:
        sent.append(route.request.post_data_buffer)
        segments = [{"start": 0, "text": " one"}, {"start": 61.5, "text": " two"}]
        route.fulfill(json={"text": "one two", "duration": 62, "segments": segments})

    mock_models(visitor, [], transcription_model="whisper")
    visitor.route("**/v1/audio/transcriptions", transcribe)
    visitor.goto(server.url)
    visitor.get_by_role("button", name="Record").click()
    visitor.get_by_text("Stop · 0:01").click()
    rows = visitor.locator(".segments li")
    rows.first.wait_for()
    assert [row.inner_text().split() for row in rows.all()] == [["0:00", "one"], ["1:01", "two"]]
    wave = sent[0][sent[0].index(b"RIFF") :]
    samples, rate = soundfile.read(io.BytesIO(wave))
    assert rate == 16000
    assert len(samples) > 8000
    assert np.abs(samples).max() > 0.01, "the fake microphone beeps"


def test_an_image_is_sent_with_a_message(visitor: Any, server: Server) -> None:
    sent: list[Any] = []

    def respond(route: Any) -> None:
        sent.append(route.request.post_data_json)
        choice = {"index": 0, "delta": {"content": "A cat."}, "finish_reason": "stop"}
        event = json.dumps({"id": "1", "choices": [choice]})
        body = f"data: {event}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    model = {
        "id": "seer",
        "root": "seer",
        "serves": "generation",
        "input_modalities": ["text", "image"],
    }
    mock_models(visitor, [model])
    visitor.route("**/v1/chat/completions", respond)
    visitor.goto(server.url)
    visitor.get_by_role("tab", name="Live").wait_for()
    image_file = {"name": "cat.svg", "mimeType": "image/svg+xml", "buffer": SVG.encode()}
    visitor.locator("#chat input[type=file]").set_input_files(image_file)
    visitor.get_by_role("button", name="Remove cat.svg").wait_for()
    visitor.get_by_label("Message", exact=True).fill("What is this?")
    visitor.keyboard.press("Enter")
    visitor.locator(".content").get_by_text("A cat.", exact=True).wait_for()
    [image, text] = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]).decode() == SVG
    visitor.get_by_text("Request and response").click()
    for view, line in [
        ("curl", "image/svg+xml;base64,$(base64 < 'cat.svg' | tr -d '\\n')"),
        ("Python", '"url": data_url("image/svg+xml", "cat.svg")'),
    ]:
        visitor.get_by_role("button", name=view, exact=True).click()
        assert line in visitor.locator(".exchange pre").text_content()
