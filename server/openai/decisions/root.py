"""`POST /` with the task `decision`: inputs and answers are those of transformers' pipeline, what
is run is what `/v1/systemone` runs: by the chat model if it is the same, which is loaded once then.

    body → inputs, as for every pipeline → a request of /v1/systemone each, in turn → their answers
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from batching.errors import InvalidInput
from server.http.json import to_json
from server.http.request import Posted, send_json
from server.openai.decisions.endpoint import DecisionEndpoint
from server.openai.decisions.systemone import SystemOneRequest
from server.openai.params import decode
from server.pipeline import Root
from server.settings import Settings
from worker.architectures import decides_in_its_own_way
from worker.decisions import DecisionInput


def decides_in_steps(settings: Settings) -> bool:
    """Whether a language model answers `POST /`, and no pipeline of the library."""
    model = settings.pipeline_model
    decides = settings.pipeline_task == "decision" and model != "none"
    return decides and not decides_in_its_own_way(model)


@dataclass(eq=False)
class DecisionRoot(Root):
    decisions: DecisionEndpoint

    async def answer(self, scope: Scope, receive: Receive, send: Send, posted: Posted) -> None:
        media, body, deadlines = posted
        read = partial(self.read, media=media)
        asked, is_list = await self.parsing.run(read, body, deadlines.first, blocks=True)
        answers = []
        for request, payload in asked:
            deltas, usage = await self.decisions.ask(scope, receive, deadlines, request, payload)
            document = request.document([each.probabilities for each in deltas], usage)
            answers.append(document["answers"])
        await send_json(send, answers if is_list else answers[0])

    def read(
        self, body: bytes, media: str
    ) -> tuple[list[tuple[SystemOneRequest, DecisionInput]], bool]:
        """In a pool thread."""
        inputs, is_list = self.parse(body, media)
        paths = [f"inputs[{n}]" if is_list else "inputs" for n in range(len(inputs))]
        return [self._request(*each) for each in zip(paths, inputs, strict=True)], is_list

    def _request(self, path: str, given: Any) -> tuple[SystemOneRequest, DecisionInput]:
        if not isinstance(given.inputs, dict) or "model" in given.inputs:
            raise InvalidInput(f"{self.task_name} takes an object of state and questions", path)
        try:
            request = decode(to_json(given.inputs), SystemOneRequest, self.decisions.models.called)
            return request, request.decision_input()
        except InvalidInput as error:
            error.param = f"{path}.{error.param}" if error.param else path
            raise
