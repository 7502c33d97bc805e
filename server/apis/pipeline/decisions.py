"""`POST /` with the task decision: state and questions as inputs, for a language model."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from starlette.types import Scope, Send

from batching.errors import InvalidInput, ItemFailed
from server.apis.openai.decisions.endpoint import DecisionEndpoint, ParsedDecision
from server.apis.openai.decisions.systemone import SystemOneRequest
from server.apis.openai.request_fields import decode
from server.apis.pipeline.endpoint import PipelineInputParser, PipelineRequest
from server.core.delta_stream import TokenStream
from server.core.worker_client import IncomingRequest
from server.http.json import Document, JsonBodyParser, to_json
from server.http.request import count_failure, send_json
from worker.messages.protocol import PipelineInput


@dataclass(eq=False)
class DecisionPipelineEndpoint:
    """`POST /` with the task decision, by a language model."""

    parser: PipelineInputParser
    decisions: DecisionEndpoint
    model: str
    body_parser: JsonBodyParser = field(init=False, default_factory=JsonBodyParser)

    async def respond(self, incoming: IncomingRequest, send: Send, body: bytes, media: str) -> None:
        scope = incoming.scope
        self.parser.check_media(media)
        parse = partial(self.parse_decisions, media=media, scope=scope)
        deadline = incoming.deadlines.first
        posted, decisions = await self.body_parser.run(parse, body, deadline, blocks=True)
        answers: list[object] = []
        for decision in decisions:
            try:
                if isinstance(decision, InvalidInput):
                    raise decision
                results = await self.decisions.decide(incoming, decision)
                answers.append(decision[0].response(*results).answers)
            except (InvalidInput, ItemFailed) as error:
                if not posted.keeps_errors:
                    raise
                answers.append(count_failure(error, scope).document)
        await send_json(send, answers if posted.is_list else answers[0])

    def parse_decisions(
        self, body: bytes, media: str, scope: Scope
    ) -> tuple[PipelineRequest, list[ParsedDecision | InvalidInput]]:
        """Return the body, and a decision or its error for each input. Runs in a pool thread."""
        posted = self.parser.parse(body, media, scope)
        decisions: list[ParsedDecision | InvalidInput] = []
        for n, payload in enumerate(posted.inputs):
            try:
                decisions.append(self._decision(payload, n if posted.is_list else None, scope))
            except InvalidInput as error:
                if not posted.keeps_errors:
                    raise
                decisions.append(error)
        return posted, decisions

    # ── LineEndpoint of ndjson.py ──

    parse_blocks: ClassVar[bool] = True

    def parse_line(self, value: str | Document, scope: Scope) -> ParsedDecision:
        posted = self.parser.read_line(value, scope)
        if posted.is_list:
            raise InvalidInput.at("inputs", "must be one object: a line has one input")
        return self._decision(posted.inputs[0], None, scope)

    def submit(self, incoming: IncomingRequest, request: ParsedDecision) -> TokenStream:
        return self.decisions.submit(incoming, request)

    async def content(self, scope: Scope, request: ParsedDecision, work: TokenStream) -> bytes:
        probabilities = [delta.probabilities for delta in await work.collect()]
        return to_json(request[0].response(probabilities, work.usage).answers)

    def _decision(self, payload: PipelineInput, index: int | None, scope: Scope) -> ParsedDecision:
        path = "inputs" if index is None else f"inputs[{index}]"
        if not isinstance(payload.inputs, dict) or "model" in payload.inputs:
            message = (
                f"{self.parser.task_name} takes an object with state and questions, without model"
            )
            raise InvalidInput(message, path)
        try:
            request = decode(payload.inputs, SystemOneRequest, self.decisions.models.id_for, scope)
            return request, request.decision_input()
        except InvalidInput as error:
            error.param = f"{path}.{error.param}" if error.param else path
            raise
