"""The tests' engine with answers from a script: texts, as a function of the prompt's text."""

from collections.abc import Callable
from typing import ClassVar

from transformers import AutoTokenizer

from service.capture.engine import Ended, Prompt
from tests.support.fake_engine import FakeEngine

Said = tuple[str, Ended]


class TalkingEngine(FakeEngine):
    """Answers with the tokens of a text; one that ends by itself with the tokenizer's end of a turn, too."""

    script: ClassVar[Callable[[str], Said]]
    end_token: ClassVar[str | None] = None
    """In place of the tokenizer's own."""
    said_ids: ClassVar[list[int]] = []
    """Said before the text of each answer."""

    def _load(self) -> None:
        super()._load()
        self._tokenizer = AutoTokenizer.from_pretrained(self._spec.weights)

    def _sample(self, prompt: Prompt) -> list[int]:
        return self._said(prompt)[0]

    def _ended(self, prompt: Prompt, sampled: list[int]) -> Ended:
        return self._said(prompt)[1]

    def _said(self, prompt: Prompt) -> tuple[list[int], Ended]:
        if prompt.generate is None:
            return [1], "length"
        asked = self._tokenizer.decode(prompt.token_ids)
        text, ended = type(self).script(asked)
        ids = [*self.said_ids, *self._tokenizer.encode(text, add_special_tokens=False)]
        if ended == "end":
            end = self._tokenizer.convert_tokens_to_ids(self.end_token or self._tokenizer.eos_token)
            ids.append(end)
        most = prompt.generate.max_tokens
        return (ids, ended) if len(ids) <= most else (ids[:most], "length")
