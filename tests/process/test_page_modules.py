"""The page's Markdown and the bounds of its store, in Node: tests/node/page.mjs."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from server.web.examples import ASSETS

MIN_NODE = 20
NODE = shutil.which("node")
SCRIPT = Path(__file__).parents[1] / "node" / "page.mjs"

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node here")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert NODE
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.lstrip("v").split(".")[0]) < MIN_NODE:
        pytest.skip(f"Node is older than {MIN_NODE}")
    folder = tmp_path_factory.mktemp("page") / "assets"
    shutil.copytree(ASSETS, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def call(modules: Path, name: str, *arguments: Any) -> list[Any]:
    """Call a function of the script for each argument."""
    assert NODE
    done = subprocess.run(
        [NODE, SCRIPT, modules],
        input=json.dumps([[name, argument] for argument in arguments]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return results


def link(url: str, label: str) -> str:
    return f"<a href={url} title={url} target=_blank rel=noopener noreferrer>{label}</a>"


def formula(text: str) -> str:
    copy = "<button type=button class=quiet copy>Copy formula</button>"
    head = f"<div class=head><span class=note>formula</span>{copy}</div>"
    return f"<div class=code>{head}<pre tabindex=0><code>{text}</code></pre></div>"


COPY = "<button type=button class=quiet copy>Copy code</button>"
CASES = {
    "**a *b* c** ~~no~~ __d__ _e_ f_g_h 2 * 3 ~5": (
        "<p><strong>a <em>b</em> c</strong> <del>no</del> <strong>d</strong> <em>e</em> f_g_h "
        "2 * 3 ~5</p>"
    ),
    "***a*** `b``c` \\*d\\*": (
        "<p><strong><em>a</em></strong> <code>b``c</code> *d*</p>"
    ),
    "**a `**b`** *`c*d`* ~~`~~`~~ **`e**": (
        "<p><strong>a <code>**b</code></strong> <em><code>c*d</code></em> "
        "<del><code>~~</code></del> <strong>`e</strong></p>"
    ),
    "# A #\n#### B": "<h3>A</h3><h6>B</h6>",
    "1. one\n   more\n\n   - two\n2. three\n- four": (
        "<ol start=1><li>one\nmore<ul><li>two</li></ul></li><li>three</li></ol>"
        "<ul><li>four</li></ul>"
    ),
    "> a\n> - b\n***": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><hr></hr>",
    "````py\n```\n````": (
        f"<div class=code><div class=head><span class=note>py</span>{COPY}</div>"
        "<pre tabindex=0><code>```</code></pre></div>"
    ),
    "| a | b\\|c | d |\n|---|:-:|--:|\n| **1** | 2 |": (
        "<div class=scroll tabindex=0 role=region aria-label=Table><table><thead><tr><th>a</th>"
        "<th class=center>b|c</th><th class=right>d</th></tr></thead><tbody><tr>"
        "<td><strong>1</strong></td><td class=center>2</td></tr></tbody></table></div>"
    ),
    "[a](https://b.c/d_(e) \"t\") ![f](http://g.h/i.png) <mailto:j@k.l>": (
        f"<p>{link('https://b.c/d_(e)', 'a')} {link('http://g.h/i.png', 'f')} "
        f"{link('mailto:j@k.l', 'mailto:j@k.l')}</p>"
    ),
    "see https://a.b/c.": f"<p>see {link('https://a.b/c', 'https://a.b/c')}.</p>",
    "so $a_1 * b_2 * c$, \\(x\\,y\\) and $$\\frac12$$.": (
        "<p>so <code class=formula>$a_1 * b_2 * c$</code>, <code class=formula>\\(x\\,y\\)</code> "
        "and <code class=formula>$$\\frac12$$</code>.</p>"
    ),
    "US$ 4, $5 *or* $6 a \\$ of $HOME": "<p>US$ 4, $5 <em>or</em> $6 a $ of $HOME</p>",
    "thus\n\\[\nx_1 = *y*\n\\]\n$$ z $$\n\\[1\\] **note**": (
        "<p>thus</p>" + formula("\\[\nx_1 = *y*\n\\]") + formula("$$ z $$") +
        "<p><code class=formula>\\[1\\]</code> <strong>note</strong></p>"
    ),
    "- $$a_b_c\n\n  d": f"<ul><li>{formula('$$a_b_c')}<p>d</p></li></ul>",
}  # fmt: skip


def test_markdown_becomes_elements(modules: Path) -> None:
    assert call(modules, "markup", *CASES) == list(CASES.values())


HARMLESS = [
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](\x01javascript:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](javascript&colon;alert(1))",
    "[a](data:text/html,b)",
    "[a](vbscript:b)",
    "[a](//c.d)",
    "[a](/v1/models)",
    "![a](data:image/svg+xml,b)",
    "<javascript:alert(1)>",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "&lt;b&gt;",
    "[[[[a]]]](((b)))",
    "[a](https://)",
]


def test_hostile_markdown_stays_text(modules: Path) -> None:
    for text, markup in zip(HARMLESS, call(modules, "markup", *HARMLESS), strict=True):
        shown = text.replace("&", "&amp;").replace("<", "&lt;")
        assert markup == f"<p>{shown}</p>"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("[https://bank.example](https://evil.example/a)", "evil.example"),
        ("[log in at bank.example](https://evil.example/a)", "evil.example"),
        ("https://bank.example@evil.example/", "evil.example"),
        ("https://\u0430pple.example/", "xn--pple-43d.example"),  # a Cyrillic letter
        ("[bank.example](mailto:a@evil.example)", "a@evil.example"),
    ],
)
def test_a_label_that_looks_like_another_address_is_followed_by_the_host(
    modules: Path, text: str, host: str
) -> None:
    [markup] = call(modules, "markup", text)
    assert f"<span class=note> ({host})</span>" in markup


def test_code_shows_characters_that_reorder_text(modules: Path) -> None:
    [block, span] = call(modules, "markup", "```\na\u202eb\n```", "`\u2066c`")
    assert "a\\u202eb" in block
    assert "\\u2066c" in span


HUGE = [
    "*a ", "**a", "*a* ", "**a*", "***", "_~*", "~~a", "[", "![", "[a](", "[a](http://",
    "[a](http://x(", "](http://x \"", "[a](https://x.example) ", "`", "`a``b```c````d", "``` ",
    "\\", "<", "<http://", "https://a", "http://!", "### ", "- ", "- a\n", "  - a\n", "- - ", "1. ",
    "> ", ">", "|", "|a\n", "a|b\n-|-\n", "| a |\n|---|\n", "a\n", "\n", " ", "\t", "x", "\u202e",
    "$", "$a", "$a ", "a$", "$$", "$$a\n", "\\(", "\\[", "\\[a\n", "$$ a $$ ",
    "*`a", "*`a` ", " *`a`",
]  # fmt: skip


def test_a_huge_text_is_drawn_in_linear_time_with_bounded_nesting(modules: Path) -> None:
    """Quadratic work on 100,000 characters takes minutes."""
    sizes = [{"unit": unit, "times": 100_000 // len(unit)} for unit in HUGE]
    nested = "".join(" " * n + "- a\n" for n in range(600))
    for size in call(modules, "size", *sizes, {"unit": nested, "times": 1}):
        assert size["created"] <= 200_000
        assert size["depth"] <= 32


@pytest.mark.parametrize("part", ["Some *words* here.\n\n", "- item\n\ntext\n\n", "```\nx\n```\n"])
def test_a_stream_draws_only_its_last_block_again(modules: Path, part: str) -> None:
    parts = [part[: len(part) // 2], part[len(part) // 2 :]] * 300
    [once, streamed] = call(modules, "stream", {"parts": ["".join(parts)]}, {"parts": parts})
    assert streamed["same"]
    assert streamed["created"] <= 4 * once["created"]


def test_python_code_names_a_large_file(modules: Path) -> None:
    content = 'say "null", \\ or\n'
    [code] = call(modules, "python", {"content": content, "chars": 30_000_000})
    body = f"""{{
        "content": {json.dumps(content)},
        "url": data_url("image/png", "image.png")
    }}"""
    assert f"json={body}," in code


def test_the_oldest_conversations_beyond_the_bounds_are_surplus(modules: Path) -> None:
    summaries = [{"id": n, "at": n, "bytes": 10} for n in (2, 0, 3, 1)]
    results = call(
        modules, "surplus", [summaries, 3, 100], [summaries, 4, 40], [summaries, 4, 25], [[], 1, 1]
    )
    assert results == [[0], [], [1, 0], []]
