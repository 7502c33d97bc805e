"""`POST /v1/decisions` and `POST /v1/systemone`: the probabilities of answers to questions.

    body → request → DecisionInput → submit → a delta per question → probabilities → response

No token is generated, and a response is never streamed: it has one time limit. `POST /` with the
task `decision` takes the inputs of transformers' pipeline and runs them like /v1/systemone, on the
chat model if both are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio.to_thread
from starlette.types import Scope, Send

from server.apis.openai.decisions.request import DecisionRequest
from server.apis.openai.decisions.systemone import SystemOneRequest
from server.apis.openai.endpoint import BodyEndpoint
from server.apis.openai.request_fields import decode
from server.core.delta_stream import TokenStream, UsageCounts
from server.core.settings import Settings
from server.core.worker_client import IncomingRequest
from server.http.json import INLINE_BYTES, parse_json, to_json
from server.http.request import send_json
from worker.decision_config import UnusableDecisionConfig, load_decision_config
from worker.messages.decisions import MAX_QUESTIONS, DecisionInput
from worker.task_detection import TaskError, read_config, tasks_of

LANGUAGE_TASKS = {"text-generation", "image-text-to-text", "any-to-any"}
DecisionBody = DecisionRequest | SystemOneRequest
ParsedDecision = tuple[DecisionBody, DecisionInput]


@dataclass(eq=False)
class DecisionEndpoint(BodyEndpoint[ParsedDecision]):
    parse_blocks = True  # 400 questions take milliseconds

    kind: type[DecisionBody]

    async def serve(self, incoming: IncomingRequest, send: Send, request: ParsedDecision) -> None:
        results = await self.decide(incoming, request)

        def encode() -> bytes:
            return to_json(request[0].response(*results))

        large = incoming.scope["transfer"].held > INLINE_BYTES  # then the response is large, too
        await send_json(send, await anyio.to_thread.run_sync(encode) if large else encode())

    def parse(self, body: bytes, scope: Scope) -> ParsedDecision:
        max_entries = max(MAX_QUESTIONS, self.models.max_entries)
        request = decode(parse_json(body), self.kind, self.models.id_for, scope, max_entries)
        return request, request.decision_input()

    async def decide(
        self, incoming: IncomingRequest, request: ParsedDecision
    ) -> tuple[list[Sequence[float]], UsageCounts]:
        """Return the probabilities of each question's options, in order, and the usage."""
        with self.submit(incoming, request) as stream:
            deltas = await stream.collect()
            return [delta.probabilities for delta in deltas], stream.usage

    def submit(self, incoming: IncomingRequest, parsed: ParsedDecision) -> TokenStream:
        request, decision_input = parsed
        model = self.models.find(request.model)
        namespace = incoming.scope["context"].cache_namespace(model.id, request.cache_salt)
        inputs = [replace(decision_input, adapter=model.adapter, cache_namespace=namespace)]
        limits = replace(incoming.deadlines, whole=incoming.deadlines.first)
        limited = incoming._replace(deadlines=limits)
        return TokenStream(self.worker_client, model.registry_name, inputs, limited)


def uses_language_model(settings: Settings, path: str) -> bool:
    """Return whether a language model serves the task of `POST /`. A pipeline serves decisions of
    other architectures, and a configuration that a language model cannot follow."""
    if settings.pipeline_task != "decision":
        return False
    try:
        load_decision_config(settings.decision_config, path)
        return not LANGUAGE_TASKS.isdisjoint(tasks_of(read_config(path)))
    except UnusableDecisionConfig:
        return False
    except TaskError:  # there is no config.json, as with a GGUF file
        return True
