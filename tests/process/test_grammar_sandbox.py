"""Untrusted grammars harm no other request: they are compiled in a sandbox first, once, decoded
within limits, and fail alone."""

import contextlib
import json
import os
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from llguidance import LLMatcher

from batching.errors import InvalidInput, ItemFailed, QueueFull, WorkerDown
from batching.fair_share import NO_OWNER, WorkOwner
from batching.request_queue import WorkItem
from tests import tiny_chat
from tests.fake_generator import FakeGenerator
from tests.generating import Driver, prepare, when_ready
from tests.processes import ROOT, is_running
from tests.serving import serving, wait_until
from tests.tiny_chat import engine
from worker.engines.generation.engine import RUNS_AHEAD
from worker.grammar import bitmask, compiler, sandbox
from worker.grammar.bitmask import BitmaskComputer, PendingMask
from worker.grammar.compiler import GrammarCompiler, compiling_for
from worker.grammar.sandbox import GrammarSandbox, SandboxResult
from worker.messages.generation import Constraint, Sampling
from worker.messages.protocol import Pending

asking = partial(tiny_chat.asking, effort="none")

TOKENIZER = tiny_chat.tokenizer()
WIDTH = len(TOKENIZER)
SLOW = Constraint("grammar", "\n" * 90_000, "f")  # minutes of CPU time, and no memory
HUNGRY = {"type": "integer", "multipleOf": 99999989}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DOUBLING = "\n".join(["start: a0 a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(60)), 'a60: "x"'])


def schema(of: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", of, "f")


def regex(of: str) -> Constraint:
    return Constraint("regex", of, "f")


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    monkeypatch.setattr(compiler, "MAX_CPU_S", 1.0)
    grammar_compiler = GrammarCompiler(TOKENIZER, WIDTH, [TOKENIZER.eos_token_id])
    yield grammar_compiler
    grammar_compiler.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grammars that were sent to the sandbox."""
    texts: list[str] = []
    check = GrammarSandbox.check

    def watched(child: GrammarSandbox, text: str, *limits: Any) -> SandboxResult:
        texts.append(text)
        return check(child, text, *limits)

    monkeypatch.setattr(GrammarSandbox, "check", watched)
    return texts


def test_endless_compilation_is_tried_once(grammars: GrammarCompiler, checked: list[str]) -> None:
    for _ in range(3):
        with pytest.raises(InvalidInput, match="too long to compile") as caught:
            when_ready(lambda: grammars.compile_constraint(SLOW))
        assert caught.value.param == "f"
    assert len(checked) == 1
    assert when_ready(lambda: grammars.compile_constraint(regex("[ab]")))  # by the same process


@pytest.mark.parametrize(
    "constraint",
    [schema(ENDLESS), Constraint("grammar", DOUBLING, "f")],
    ids=["endless", "doubles"],
)
def test_grammar_without_a_finite_text_is_an_error_with_the_reason(
    grammars: GrammarCompiler, constraint: Constraint
) -> None:
    reason = "no text matches|too complex, or requires text with|too long to compile"
    with pytest.raises(InvalidInput, match=reason):  # the latter on a slow machine
        when_ready(lambda: grammars.compile_constraint(constraint))


def test_forced_text_hides_no_error_from_the_sandbox(grammars: GrammarCompiler) -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    rule = f'start: "{string.ascii_letters}" %json {json.dumps(loop)}'
    with pytest.raises(InvalidInput, match="no text matches it"):
        when_ready(lambda: grammars.compile(rule, "f"))


def test_equal_grammars_are_compiled_once(grammars: GrammarCompiler, checked: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(when_ready, lambda: grammars.compile_constraint(regex("a+")))
            for _ in range(8)
        ]
        assert len({id(future.result()) for future in futures}) == 1
    assert len(checked) == 1


def test_sandbox_results_outlive_evicted_grammars(
    grammars: GrammarCompiler, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for char in "abcdabcd":
        when_ready(lambda char=char: grammars.compile_constraint(regex(char)))  # type: ignore[misc]
    assert len(checked) == 4


def test_grammars_in_use_are_limited_in_bytes(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "ERROR_TTL_S", 3600.0)
    monkeypatch.setattr(compiler, "MAX_BYTES", 2 << 30)
    used = when_ready(lambda: grammars.compile_constraint(regex("a")))
    used.size = 1 << 30
    with pytest.raises(QueueFull, match="memory"):
        when_ready(lambda: grammars.compile_constraint(regex("[b-z]+")))
    del used  # its last user is done, and it was evicted
    grammars._errors.clear()  # time has passed
    assert when_ready(lambda: grammars.compile_constraint(regex("[b-z]+")))


def test_grammars_of_a_client_leave_memory_to_others(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(client: str, text: str) -> compiler.Grammar:
        compiling_for.set(client)
        return when_ready(lambda: grammars.compile_constraint(regex(text)))

    monkeypatch.setattr(compiler, "ERROR_TTL_S", 3600.0)
    monkeypatch.setattr(compiler, "MAX_BYTES", 2 << 30)
    of_client = [use("one", text) for text in "abcd"]
    for grammar in of_client:
        grammar.size = 256 << 20
    with pytest.raises(QueueFull, match="memory"):
        use("one", "[e-z]+")
    assert use("another", "[e-z]*")


def test_cancelled_grammars_are_not_compiled(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checked = threading.Event(), []

    def slow(_: GrammarSandbox, text: str, *limits: Any) -> SandboxResult:
        checked.append(text)
        gate.wait()
        return SandboxResult("enough")

    when_ready(lambda: grammars.compile_constraint(regex("a")))
    monkeypatch.setattr(GrammarSandbox, "check", slow)
    done = threading.Event()
    for char, wanted in (("b", True), ("c", False), ("d", True)):
        with pytest.raises(Pending) as pending:
            grammars.compile_constraint(regex(char))
        again = done.set if char == "d" else lambda: None
        pending.value.then(NO_OWNER, lambda wanted=wanted: wanted, again)  # type: ignore[misc]
    gate.set()
    assert done.wait(30)
    assert checked == ["start: /b/", "start: /d/"]


# ── the process ──


def make_sandbox() -> GrammarSandbox:
    return GrammarSandbox(TOKENIZER.backend_tokenizer.to_str(), WIDTH, [TOKENIZER.eos_token_id])


def test_killed_sandbox_is_replaced() -> None:
    child = make_sandbox()
    assert child.check("start: /a/", False, True, 5).reason is None
    assert child._process
    os.kill(child._process.pid, signal.SIGKILL)
    assert child.check("start: /a/", False, True, 5).reason is None
    child.close()
    assert child._process is None


def test_grammar_out_of_memory_leaves_the_sandbox_running() -> None:
    child = make_sandbox()
    pid = child.start().pid
    nested = "start: " + "(" * 20_000 + '"a"' + ")" * 20_000
    many = json.dumps({"type": "string", "allOf": [
        {"pattern": f"(a|b)*a(a|b){{{n + 3}}}"} for n in range(25)
    ]})  # fmt: skip
    for grammar in (nested, f"start: %json {many}"):
        assert child.check(grammar, False, True, 20).reason
    assert child.check("start: /a/", False, True, 5).reason is None
    assert child._process
    assert child._process.pid == pid
    child.close()


SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from worker.grammar.sandbox import GrammarSandbox
child = GrammarSandbox(open(sys.argv[2]).read(), int(sys.argv[3]), [1])
print(child.start().pid, flush=True)
child.check(sys.argv[4], False, True, 1.0)
sys.stdin.read()
"""


@pytest.mark.parametrize("grammar", ["start: /a/", f"start: %json {json.dumps(HUNGRY)}"])
def test_sandbox_ends_with_a_killed_server(grammar: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZER.backend_tokenizer.to_str())
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ROOT), str(file), str(WIDTH), grammar],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout
        pid = int(server.stdout.readline())
        assert is_running(pid)
        server.kill()
    wait_until(lambda: not is_running(pid), 120)


def test_sandbox_ends_with_the_server_and_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CPU_S", 1.0)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "response_format": schema}
    with serving(chat_model="demo") as server:
        generator: Any = server.worker_client.models["generation"].generator
        grammars = generator.input_processor.constraint_builder.grammars
        assert not grammars._loaded  # no grammar has been requested
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "1"
        pid = grammars._loaded[1]._process.pid
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        hungry = {"type": "json_schema", "json_schema": {"name": "x", "schema": HUNGRY}}
        answer = httpx.post(
            server.url + "/v1/chat/completions",
            json=body | {"response_format": hungry},
            timeout=60,
        )
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert (
            "too long" in message or "too much memory" in message
        )  # depends on the machine's speed
    wait_until(lambda: not is_running(pid))


# ── other requests ──


class Waiting(FakeGenerator):
    """`prepare` of a prompt with "wait" is pending until `again` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Any] = []
        self.ready = False

    def prepare(self, item: WorkItem[Any, Any]) -> None:
        if "wait" in str(item.payload.prompt) and not self.ready:
            raise Pending(lambda owner, wanted, again: self.again.append(again))
        super().prepare(item)


def test_requests_that_wait_for_a_grammar_block_no_pool_thread() -> None:
    generator = Waiting()

    def post(server: Any, text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}]}
        return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).status_code

    with serving(load_chat=lambda: generator, chat_model="x") as server:
        threads = 3 * len(server.worker_client.prepare.threads)
        with ThreadPoolExecutor(threads) as clients:
            waiting = [clients.submit(post, server, "wait") for _ in range(threads)]
            wait_until(lambda: len(generator.again) == threads)
            assert post(server, "hello") == 200
            assert not any(future.done() for future in waiting)
            generator.ready = True
            for again in generator.again:
                again()
            assert [future.result() for future in waiting] == [200] * threads


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Masks of grammars whose `size` is LATE are not computed before it is set."""
    event, bits = threading.Event(), PendingMask._bits

    def waiting(mask: PendingMask, computer: BitmaskComputer) -> Any:
        if mask.grammar and mask.grammar.size == LATE:
            event.wait()
        return bits(mask, computer)

    monkeypatch.setattr(PendingMask, "_bits", waiting)
    yield event
    event.set()


LATE = -1


def late(item: Any) -> Any:
    """Hold the masks of a request until `gate` is set."""
    item.prepared[0].prepared.constraints.content.size = LATE
    return item


def test_cpu_time_of_late_masks_counts_as_the_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(engine())
    item = driver.add(owned(asking(constraint=regex("[ab]{20}v")))).item
    grammar: Any = item.prepared[0].prepared.constraints.content  # type: ignore[union-attr]
    compilation = grammar.cpu_s
    driver.step()
    assert grammar.cpu_s == compilation > 0
    monkeypatch.setattr(bitmask, "MAX_WAIT_S", 0.0)
    driver.finish()
    assert grammar.cpu_s > compilation
    assert grammar.is_slow


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_without_a_mask_sit_out_while_others_decode(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setitem(RUNS_AHEAD, "cpu", ahead)
    driver = Driver(engine())
    held = driver.add(owned(asking(constraint=regex("[ab]{9}w"), n=bitmask.MAX_THREADS)))
    late(held.item)
    other = driver.add(owned(asking(max_tokens=6, stopping={"ignore_eos": True})))
    mate = driver.add(owned(asking(constraint=regex("[cd]{4}y"))))
    while not (other.done and mate.done):
        driver.step()
    assert mate.choices[0].text.endswith("y")
    assert not held.deltas
    with monkeypatch.context() as patch:
        patch.setattr(driver.generator.runner, "forward", None)
        driver.step()  # waits a moment, and runs nothing
    gate.set()
    driver.finish()
    assert all(choice.text.endswith("w") for choice in held.choices)


@pytest.mark.parametrize("running", [False, True])
def test_grammar_that_takes_all_of_its_time_fails_its_requests_alone(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    now_s = 0.0
    monkeypatch.setattr(bitmask, "cpu_s", lambda thread: now_s)
    generator = engine()
    driver, pattern = Driver(generator), f"[ab]{{20}}{'xz'[running]}"
    held = driver.add(owned(asking(constraint=regex(pattern), n=2)))
    late(held.item)
    mate = driver.add(owned(asking(constraint=regex("[cd]{20}y"))))
    driver.step()
    now_s = compiler.MAX_CPU_S + 1.0
    if not running:
        gate.set()
        for mask in generator._pending_masks.values():
            mask.outcome.result(60)
    driver.finish()
    assert isinstance(held.error, ItemFailed)
    assert "too long to compute a token mask" in str(held.error)
    assert mate.choices[0].text.endswith("y")
    with pytest.raises(InvalidInput, match="next token takes too long"):
        prepare(generator, asking(constraint=regex(pattern)))


def test_waiting_choices_have_no_copy_of_their_grammar() -> None:
    item = asking(constraint=regex("[ab]{20}"), n=3)
    prepare(engine(), item)
    states: list[Any] = [choice.constraints for choice in item.prepared]
    assert not any("matcher" in vars(state._grammar) for state in states)


def test_close_does_not_wait_for_the_sandbox(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_ready(lambda: grammars.tokenizer("f"))
    check: Any = GrammarSandbox.check
    monkeypatch.setattr(GrammarSandbox, "check", lambda *args: check(*args[:-1], 3600.0))
    with pytest.raises(Pending):
        grammars.compile_constraint(SLOW)
    child = wait_for_sandbox(grammars)
    wait_until(lambda: has_fork(child))
    closing = threading.Thread(target=grammars.close, daemon=True)
    closing.start()
    closing.join(10)  # the fork's own limit is 20 s
    assert not closing.is_alive()


def wait_for_sandbox(grammars: GrammarCompiler) -> Any:
    wait_until(lambda: grammars._loaded is not None)
    assert grammars._loaded is not None
    return grammars._loaded[1]


def has_fork(process: Any) -> bool:
    """Whether the process has a fork."""
    parents = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parents.append(int(stat.read_text().rpartition(")")[2].split()[1]))
    return process._process.pid in parents


def test_failed_start_of_the_grammar_thread_is_retried(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "start_with_large_stack", Mock(side_effect=RuntimeError))
        with pytest.raises(WorkerDown):
            grammars.compile_constraint(regex("[ab]"))
    assert when_ready(lambda: grammars.compile_constraint(regex("[ab]")))


def test_clients_have_grammars_compiled_in_turn(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checked = threading.Event(), []

    def check(_: GrammarSandbox, text: str, *limits: Any) -> SandboxResult:
        assert gate.wait(60)
        checked.append(text)
        return SandboxResult("enough")

    monkeypatch.setattr(compiler, "MAX_QUEUED", 3)
    when_ready(lambda: grammars.tokenizer("f"))
    monkeypatch.setattr(GrammarSandbox, "check", check)
    done = []
    for client, texts in (("one", "abc"), ("another", "d")):
        compiling_for.set(client)
        for text in texts:
            with pytest.raises(Pending) as pending:
                grammars.compile_constraint(regex(text))
            done.append(threading.Event())
            pending.value.then(NO_OWNER, lambda: True, done[-1].set)
    compiling_for.set("one")
    with pytest.raises(QueueFull):
        grammars.compile_constraint(regex("e"))
    gate.set()
    assert all(event.wait(60) for event in done)
    assert checked.index("start: /d/") <= 1  # the first may run before it arrives


def test_temporary_failure_reaches_all_waiting_requests(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, attempts = threading.Event(), 0

    def failing(*args: Any) -> SandboxResult:
        nonlocal attempts
        attempts += 1
        assert gate.wait(60)
        raise OSError("no process can be started")

    monkeypatch.setattr(compiler, "ERROR_TTL_S", 3600.0)
    when_ready(lambda: grammars.tokenizer("f"))
    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(GrammarSandbox, "check", failing)
        futures = [
            pool.submit(when_ready, lambda: grammars.compile_constraint(regex("[ab]")))
            for _ in range(8)
        ]
        wait_until(lambda: sum(len(task.waiting) for task in grammars._tasks.values()) == 8)
        gate.set()
        for future in futures:
            with pytest.raises(WorkerDown):
                future.result(60)
    assert attempts == 1
    grammars._errors.clear()  # time has passed
    assert when_ready(lambda: grammars.compile_constraint(regex("[ab]")))


def test_a_grammar_that_the_machine_has_no_time_for_is_not_refused_later(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    when_ready(lambda: grammars.tokenizer("f"))
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "WALL_S", 0.01)
        patch.setattr(sandbox, "_check", lambda *_: signal.pause())
        stalled = SandboxResult(*sandbox._check_in_fork(None, 60.0))  # type: ignore[arg-type]
        patch.setattr(GrammarSandbox, "check", lambda *_: stalled)
        with pytest.raises(WorkerDown, match="temporarily"):
            when_ready(lambda: grammars.compile_constraint(regex("[ab]")))
    grammars._errors.clear()  # time has passed
    assert when_ready(lambda: grammars.compile_constraint(regex("[ab]")))


def owned(item: Any) -> Any:
    item.owner = WorkOwner("")
    return item


@pytest.mark.parametrize("ahead", [False, True])
def test_deferred_masks_change_no_output_and_delay_no_others(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setitem(RUNS_AHEAD, "cpu", ahead)
    sampling = Sampling(temperature=1.0, seed=3)

    def texts() -> list[str]:
        driver = Driver(engine())
        many = driver.add(owned(asking(sampling=sampling, constraint=regex("[ab]{9}x"), n=5)))
        other = driver.add(owned(asking(max_tokens=6, stopping={"ignore_eos": True})))
        for _ in range(7 + ahead):
            driver.step()
        assert other.done
        driver.finish()
        return [choice.text for choice in many.choices]

    expected = texts()
    assert len(set(expected)) > 1
    monkeypatch.setattr(bitmask, "MAX_WAIT_S", 0.0)
    assert texts() == expected


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: sum\n?sum: number (("+" | "-") number)*\nnumber: /[0-9]+/',  # as outlines sends it
        '%import common.INT\n\n!start : "a" INT',
        'root ::= "start:" digit\ndigit ::= [0-9]',
        '# a comment\nroot ::=\n  "a"',
    ],
)
def test_gbnf_is_recognized_by_its_rules(grammar: str) -> None:
    lark = sandbox.to_lark(grammar, is_client_grammar=True, forces_text=True)
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark)) == ""
    assert (lark == grammar) == ("::=" not in grammar)
