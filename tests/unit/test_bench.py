"""scripts/bench.py summarizes its measurements, and starts, suspends and stops servers."""

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


bench, floors = map(script, ("bench", "bench_floor"))
servers, models = map(script, ("bench_servers", "bench_models"))


def checkpoint(folder: Path, **shapes: list[int]) -> Path:
    tensors = {name.replace("__", "."): np.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_step_reads_all_weights_but_an_untied_embedding(tmp_path: Path) -> None:
    shapes = {"embed__weight": [100, 8], "up__weight": [16, 8]}
    assert floors.count_weights(checkpoint(tmp_path, **shapes)) == 800 + 128
    assert floors.count_weights(checkpoint(tmp_path, lm_head__weight=[100, 8], **shapes)) == 928


def test_the_floor_counts_the_keys_and_values_of_each_client() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    assert floors.cached_values(config) == 2 * 2 * 64
    assert floors.cached_values(config | {"num_key_value_heads": 2, "head_dim": 16}) == 2 * 2 * 32
    assert floors.cached_values({"n_head": 8}) == 0
    floor = floors.Floor(weight_bytes=1_000_000, bytes_per_s=100e6, token_bytes=1_000)
    assert floor.share(tokens_per_s=200, clients=4, context=250) == pytest.approx(1.0)


def test_each_token_of_a_random_model_has_a_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    models.save("qwen3-tiny", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert [tokenizer.decode([id]) for id in (2000, 4095)] == [" 2000", " 4095"]
    demo = AutoTokenizer.from_pretrained(str(models.DEMO / "chat"))
    text = "<|im_start|>user\nIt is 2000 and 4095."
    assert tokenizer(text).input_ids == demo(text).input_ids
    assert tokenizer.eos_token_id == demo.eos_token_id


def test_a_report_has_medians_the_others_maximum_and_ratios() -> None:
    rates = {"onequeue": [150.0, 100.0, 200.0], "onequeue@old": [100.0], "vllm": [300.0]}
    runs = {
        name: [{"tokens_per_s": rate, "ttft_p50_ms": 60.0, "others_cores": rate} for rate in values]
        for name, values in rates.items()
    }
    medians = bench.medians({(("clients", 1),): runs})
    figures = medians[(("clients", 1),)]["onequeue"]
    assert figures == {"tokens_per_s": 150, "ttft_p50_ms": 60, "others_cores": 200}
    ratios = [(r["server"], r["beside"], r["times"]["tokens_per_s"]) for r in bench.ratios(medians)]
    assert ratios == [
        ("onequeue", "onequeue@old", 1.5), ("onequeue", "vllm", 0.5), ("onequeue@old", "vllm", 0.33)
    ]  # fmt: skip
    head, rule, *rows = bench.table(medians)
    assert head == "| clients | server | tokens_per_s | ttft_p50_ms |"
    assert head.count("|") == rule.count("|")
    assert rows[0] == "| 1 | onequeue | 150 | 60 |"
    assert len(rows) == 3


def test_quantized_servers_are_compared_with_the_same_number_of_bits() -> None:
    ours = ["onequeue", "onequeue:QUANTIZATION=int8", "onequeue:QUANTIZATION=int4"]
    peers = ["vllm", "llama:m-BF16.gguf", "llama:m-Q8_0.gguf", "llama:m-Q4_0.gguf"]
    assert list(bench.pairs(ours + peers)) == [
        (ours[0], peers[0]),
        (ours[0], peers[1]),
        (ours[1], peers[2]),
        (ours[2], peers[3]),
    ]
    assert list(bench.pairs([ours[1], "vllm"])) == [(ours[1], "vllm")]


def test_every_benchmark_yields_loads_with_the_flags_of_the_load_test(tmp_path: Path) -> None:
    from server.commands.load_test.arguments import parse_args

    model = str(models.DEMO / "chat")
    for name, entry in bench.BENCHES.items():
        arguments = argparse.Namespace(
            bench=name, folder=str(tmp_path), model=model, clients=[1, 2], requests=1, tokens=4,
            temperature=[0], prompt_words=[8], questions=False,
        )  # fmt: skip
        loads = list(entry.loads(arguments, 0))
        assert loads
        for flags in (flags for load in loads for flags in (load.flags, load.background) if flags):
            parse_args("load", ["http://x", *servers.command_line(flags)])


def test_a_server_name_sets_the_checkout_and_settings(tmp_path: Path) -> None:
    launch = servers.onequeue(f"onequeue@{tmp_path}:COMPILE=off,DTYPE=float32", 1, {"DTYPE": "x"})
    assert launch.folder == tmp_path
    assert launch.environ["COMPILE"] == "off"
    assert launch.environ["DTYPE"] == "float32"
    assert servers.onequeue("onequeue", 1, {}).folder == SCRIPTS.parent


def test_servers_that_do_not_fit_into_memory_together_run_one_after_another() -> None:
    assert bench.groups(["a", "b"], 1 << 30, 16 << 30) == [["a", "b"]]
    assert bench.groups(["a", "b"], 4 << 30, 16 << 30) == [["a"], ["b"]]
    assert bench.groups(["a", "llama:b"], 3 << 30, 16 << 30) == [["a", "llama:b"]]


def test_a_server_is_suspended_unless_it_is_resumed() -> None:
    port = servers.free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with servers.running("peer", servers.Launch(command, port, "/", {})) as server:
        assert state(server.process.pid) == "T"
        with server.resumed():
            assert servers.is_up(servers.Launch(command, port, "/", {}))
        assert state(server.process.pid) == "T"
    assert server.process.poll() == -signal.SIGTERM


def test_cpu_time_of_other_processes_excludes_our_own_sessions() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", burn], start_new_session=True, stdin=pipe, stdout=pipe
    ) as other:
        assert other.stdout
        other.stdout.readline()
        known = servers.other_cpu_seconds({os.getsid(0), other.pid})
        assert servers.other_cpu_seconds({os.getsid(0)}) - known >= 0.25
        other.communicate(b"\n")


def state(process: int) -> str:
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


# ── the Python that runs a script ──

OTHER_PYTHON = [str(Path(sys.base_prefix) / "bin" / "python3"), "-S"]  # without our packages


def test_a_script_started_with_another_python_runs_with_the_packages_of_venv() -> None:
    command = [*OTHER_PYTHON, str(SCRIPTS / "bench.py"), "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "bench.py generation --model PATH" in output


def test_a_script_without_venv_names_the_command_that_creates_it(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "environment.py", tmp_path / "scripts")
    command = [*OTHER_PYTHON, "-E", str(tmp_path / "scripts" / "environment.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("needs the packages in .venv: run scripts/install first")
    assert result.stderr.count("\n") == 1
