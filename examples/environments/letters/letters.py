"""An environment of verifiers that a tiny model can learn: to answer `c=` with the letter c, eight times.

    trinity-es env install examples/environments/letters
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersConfig(vf.TasksetConfig):
    letters: str = "abcdefghijklmnop"
    length: int = 8


class LetterData(vf.TaskData):
    letter: str
    length: int


class LetterTask(vf.Task[LetterData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """Return the share of the first `length` characters that are the wanted letter, from 0 to 1."""
        [said] = [node.message.content or "" for node in trace.nodes if node.sampled]
        return said[: self.data.length].count(self.data.letter) / self.data.length


class LettersTaskset(vf.Taskset[LetterTask, LettersConfig]):
    def load(self) -> Iterator[LetterTask]:
        for letter in self.config.letters:
            data = LetterData(prompt=f"{letter}=", letter=letter, length=self.config.length)
            yield LetterTask(data, self.config.task)
