"""From settings to a runner, on the worker thread: the pipeline, whether it has the weights that
its answers depend on, how it batches. From then on runner.py does the work.
"""

from functools import partial

from worker.architectures import advice, made_for
from worker.decode_budget import DecodeBudget
from worker.model import cpu_linear, missing_weights
from worker.model.loading import LoadingFailed, LoadOptions, Pipe, free_bytes, load_pipeline
from worker.pipeline.batch_check import choose_batching
from worker.pipeline.inputs import InputReader, warm_up_input
from worker.pipeline.outputs import to_json
from worker.pipeline.runner import PipelineRunner
from worker.protocol import ModelInfo, PipelineInput
from worker.tasks import TASKS, resolve_task


def load_runner(options: LoadOptions, max_rows: int) -> PipelineRunner:
    """Raises LoadingFailed if the model is not there, or was not made for the task."""
    pipe, lacking = load_pipeline(options)
    task = resolve_task(options.task)
    if missing_weights.matter(pipe.model, lacking, partial(_warm_up_answer, pipe, task)):
        config = pipe.model.config.to_dict()
        advised = "" if task in made_for(config) else f"; {advice(config)}"
        raise LoadingFailed(
            f"the model {options.model!r} was not made for {task}: its checkpoint has no weights "
            f"for {missing_weights.shown(lacking)}{advised}"
        )
    if pipe.tokenizer is not None and TASKS[task].kind == "text":
        pipe.tokenizer.padding_side = "left" if task == "text-generation" else "right"
    batching, why, packing = choose_batching(task, pipe)
    info = ModelInfo(
        task=task,
        model=options.model,
        device=str(pipe.device),
        dtype=str(pipe.dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in pipe.model.parameters()),
        batching=batching,
        why=why,
    )
    budget = DecodeBudget(int(options.max_image_mp * 1e6))
    runner = PipelineRunner(pipe, info, packing, budget, max_rows)
    on_cpu, dtype = pipe.device.type == "cpu", pipe.dtype
    if on_cpu and cpu_linear.packs(dtype) and cpu_linear.emulates(dtype):
        cpu_linear.pack(pipe.model, free_bytes(pipe.device), runner.warm_up)
    return runner


def _warm_up_answer(pipe: Pipe, task: str) -> bytes:
    """What the pipeline says to the warm-up input; all that it finds, where it would choose."""
    inputs, parameters = warm_up_input(task, pipe)
    if "threshold" in TASKS[task].parameters:
        parameters = {**parameters, "threshold": 0.0}
    payload = PipelineInput(inputs, parameters)
    with DecodeBudget(1 << 20).lease() as lease:
        return to_json(pipe(InputReader(task, pipe).read(payload, pipe, lease), **parameters))
