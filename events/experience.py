"""Experiences, which rollouts produce and trainers learn from, and their serialisation.

An experience is checked when it is made, and again when it is serialised, since it may change in between. Its arrays
are numpy. Torch tensors are accepted, but this module never imports torch, so a machine without torch can read
payloads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, Self

import numpy as np

from trinity_es.events.eid import EID, CustomField
from trinity_es.events.errors import DataError, NotFinite
from trinity_es.events.experience_encoding import (
    JSON,
    TEXTS,
    VECTORS,
    Decoder,
    columns_of,
    fields_of,
    item_of,
    same_array,
)
from trinity_es.events.flat_columns import Array
from trinity_es.events.json_values import NotPlain, plain
from trinity_es.events.payload_format import DTYPES, Payload, decoding, encode
from trinity_es.events.token_versions import listed, model_versions, version_spans
from trinity_es.events.values import shown

__all__ = ["EID", "LARGEST_REWARD", "Array", "CustomField", "Experience", "group_by"]

_log = logging.getLogger(__name__)
_warn_once = lru_cache(maxsize=100)(_log.warning)

LARGEST_REWARD: Final = 1e30
"""Maximum absolute reward. Trainers compute in float32, where a larger reward makes its group's advantages NaN."""
_TOKENS: Final = tuple(name for name, (dtype, _) in VECTORS.items() if dtype.kind == "i")
Messages = list[dict[str, Any]] | None
_FINITE: Final = (*(name for name, (dtype, _) in VECTORS.items() if dtype.kind == "f"), "routed_experts")


class Experience:
    """Training sample: token ids, log probabilities of the response, and a reward.

    All arguments are keywords. Arrays may be lists, numpy arrays or torch tensors (bfloat16 becomes float32). They
    become numpy arrays, without a copy if the dtype fits. S tokens with a prompt of P have a response of R = S - P.

    - `eid` EID or its dict; a new one by default
    - `tokens` int32 [S], none negative; for a preference pair (dpo) the prompt alone
    - `prompt_length` P; None: S - len(action_mask), else S - len(logprobs), else 1 (also if these have length S); S for
      a preference pair
    - `logprobs, token_level_reward, advantages, returns, teacher_logprobs` float32 [R] (log probabilities in nats)
      logprobs of all tokens [S], or of all but the first [S - 1], are cut to the response
    - `action_mask` bool [R] (or [S], cut to the response), true for tokens that the model generated; by default all
      true, all false for a truncated prompt, None for a preference pair
    - `reward` finite, at most 1e30, or None
    - `chosen, rejected` int32, none negative, any length: the two responses of a preference pair
    - `routed_experts` any dtype and shape ([S - 1, layers, k]); `multi_modal_inputs` a dict of any arrays
    - `info, metrics, messages, tools, chosen_messages, rejected_messages` JSON; numpy scalars become Python numbers
    - `truncate_status` ("prompt_truncated", "response_truncated"), `prompt_text, response_text`
    - `custom_fields` list of CustomField

    `experience_type` is "multi_turn" with an action mask, "dpo" with chosen and rejected, else "single_turn". Raises
    DataError, naming experience, field and index, for shapes that don't agree, negative token ids, numbers that are not
    finite, and values that are not JSON.

    Two experiences are equal if all fields are equal, arrays bit by bit.
    """

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by value

    tokens: Array
    prompt_length: int
    logprobs: Array | None
    token_level_reward: Array | None
    advantages: Array | None
    returns: Array | None
    action_mask: Array | None
    chosen: Array | None
    rejected: Array | None
    multi_modal_inputs: dict[str, Array] | None
    teacher_logprobs: Array | None
    routed_experts: Array | None

    def __init__(
        self, *, tokens: Any, eid: EID | dict[str, Any] | None = None, prompt_length: int | None = None,
        logprobs: Any = None, reward: float | None = None, token_level_reward: Any = None, advantages: Any = None,
        returns: Any = None, action_mask: Any = None, truncate_status: str | None = None,
        info: dict[str, Any] | None = None, metrics: dict[str, float] | None = None, prompt_text: str | None = None,
        response_text: str | None = None, messages: Messages = None, tools: Messages = None, chosen: Any = None,
        rejected: Any = None, chosen_messages: Messages = None, rejected_messages: Messages = None,
        multi_modal_inputs: dict[str, Any] | None = None, teacher_logprobs: Any = None, routed_experts: Any = None,
        custom_fields: list[CustomField] | None = None,
    ) -> None:
        self.eid = EID() if eid is None else EID.from_dict(eid) if isinstance(eid, dict) else eid
        self.experience_type = (
            "multi_turn" if action_mask is not None
            else "dpo" if chosen is not None and rejected is not None
            else "single_turn"
        )
        self.tokens = self._as_vector("tokens", tokens)
        self.logprobs = self._as_vector("logprobs", logprobs)
        self.action_mask = self._as_vector("action_mask", action_mask)
        seq = len(self.tokens) if self.tokens is not None else 0
        if self.experience_type == "dpo":
            self.prompt_length = seq
        elif prompt_length is not None:
            self.prompt_length = prompt_length
        else:
            aligned = self.action_mask if self.action_mask is not None else self.logprobs
            # A vector over all tokens does not show the length of the prompt.
            self.prompt_length = 1 if aligned is None or len(aligned) == seq else seq - len(aligned)
        self.token_level_reward, self.advantages, self.returns = token_level_reward, advantages, returns
        self.chosen, self.rejected, self.teacher_logprobs = chosen, rejected, teacher_logprobs
        self.multi_modal_inputs, self.routed_experts = multi_modal_inputs, routed_experts
        self.reward, self.info, self.metrics = reward, info or {}, metrics or {}
        self.truncate_status, self.prompt_text, self.response_text = truncate_status, prompt_text, response_text
        self.messages, self.tools = messages, tools
        self.chosen_messages, self.rejected_messages = chosen_messages, rejected_messages
        self.custom_fields = list(custom_fields or ())
        self.validate()

    # --- checks -----------------------------------------------------------------------------------------------------
    def _field_error(self, name: str, problem: str, place: str = "", kind: type[DataError] = DataError) -> DataError:
        """Return an error whose message names the experience, the field, `place` (an index in it) and `problem`."""
        uid = self.eid.uid if isinstance(self.eid, EID) else repr(self.eid)
        # Until its runner sets batch and task, the id of an experience says nothing.
        is_new = isinstance(self.eid, EID) and self.eid.batch == self.eid.task == ""
        subject = "a new experience" if is_new else f"experience {uid}"
        return kind(f"{subject}: {name}{place} {problem}", eid=uid, field=name)

    def _as_vector(self, name: str, value: Any) -> Any:
        """Convert a value to a 1-D array of the field's dtype; None stays None. Raises DataError."""
        dtype = VECTORS[name][0]
        if value is None or (type(value) is np.ndarray and value.dtype is dtype and value.ndim == 1):
            return value
        array = self._as_array(name, value)
        if array.ndim != 1:
            raise self._field_error(name, f"has shape {array.shape}, expected one dimension")
        if array.dtype == dtype:
            return array.astype(dtype, copy=False)
        fits = {"i": "iu", "f": "fiu", "b": "biu"}[dtype.kind]
        if dtype.kind in "ib" and array.dtype.kind == "f" and bool((array == np.rint(array)).all()):
            if dtype.kind == "i":
                warning = "Experience: %s given as %s: whole numbers are taken as %s, give them as integers"
                _warn_once(warning, name, array.dtype, dtype)
            fits += "f"
        if array.size and array.dtype.kind not in fits:
            raise self._field_error(name, f"has dtype {array.dtype}, expected {dtype}")
        if dtype.kind == "i" and array.size:
            bounds = np.iinfo(dtype)
            if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
                raise self._field_error(name, f"holds numbers that don't fit {dtype}")
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError as e:
            raise self._field_error(name, f"holds numbers that don't fit {dtype}", kind=NotFinite) from e

    def _as_array(self, name: str, value: Any) -> Array:
        """Convert a value to a numpy array of a dtype that payloads support. Raises DataError."""
        try:
            if hasattr(value, "detach"):  # a torch tensor, perhaps on a GPU
                value = value.detach().cpu()
                if str(value.dtype) == "torch.bfloat16":  # numpy has none; float32 holds it exactly
                    value = value.float()
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as e:
            raise self._field_error(name, f"can't be converted to an array ({e})") from e
        dtype = array.dtype.newbyteorder("=")
        if dtype not in DTYPES:
            raise self._field_error(name, f"has dtype {array.dtype}, which can't be stored: use numbers or bools")
        return array.astype(dtype, copy=False)

    def _as_json(self, name: str, value: Any, kind: type) -> Any:
        """Return a copy of a JSON value in Python's own types. Raises DataError if it is not JSON, or not a `kind`."""
        if not isinstance(value, kind) or isinstance(value, str):
            raise self._field_error(name, f"is a {type(value).__name__}, expected a {kind.__name__}")
        try:
            return plain(value)
        except NotPlain as e:
            raise self._field_error(name + "".join(reversed(e.path)), e.problem) from None

    def validate(self) -> None:
        """Check every field, and convert new values (tensors, lists, numpy scalars). Raises DataError."""
        if not isinstance(self.eid, EID):
            raise self._field_error("eid", f"is a {type(self.eid).__name__}, expected an EID")
        fields = self.__dict__
        for name in VECTORS:
            if fields[name] is not None:
                fields[name] = self._as_vector(name, fields[name])
        if fields["tokens"] is None:
            raise self._field_error("tokens", "are missing")
        for name in _TOKENS:
            array = fields[name]
            if array is not None and array.size and array.min() < 0:
                index = int(np.argmax(array < 0))
                raise self._field_error(name, f"is {array[index]}: token ids must be 0 or more", place=f"[{index}]")
        self._check_lengths()
        if self.reward is not None:
            self.reward = self._reward_as_float(self.reward)
        if self.routed_experts is not None:
            self.routed_experts = self._as_array("routed_experts", self.routed_experts)
        if self.multi_modal_inputs is not None:
            # This checks only that the keys are valid JSON.
            self._as_json("multi_modal_inputs", dict.fromkeys(self.multi_modal_inputs), dict)
            self.multi_modal_inputs = {
                str.__str__(key): self._as_array(f"multi_modal_inputs.{key}", value)
                for key, value in self.multi_modal_inputs.items()
            }
        self.require_finite()
        for name in TEXTS:
            value = fields[name]
            if value is not None:
                if not isinstance(value, str):
                    raise self._field_error(name, f"is a {type(value).__name__}, expected text")
                if not value.isascii():
                    self._as_json(name, [value], list)
        self.info = self._as_json("info", self.info, dict) if self.info else {}
        self.metrics = self._as_json("metrics", self.metrics, dict) if self.metrics else {}
        for name in JSON:
            if fields[name] is not None:
                fields[name] = self._as_json(name, fields[name], Sequence)
        if not all(isinstance(c, CustomField) for c in self.custom_fields):
            raise self._field_error("custom_fields", f"is {self.custom_fields!r}, expected a list of CustomField")

    def require_finite(self) -> None:
        """Raise NotFinite if the reward is beyond 1e30, or any array holds NaN or an infinity. Part of `validate`."""
        fields = self.__dict__
        reward = fields["reward"]
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            problem = f"is {reward}: it must be finite and at most 1e30, since trainers compute in float32"
            raise self._field_error("reward", problem, kind=NotFinite)
        for name in _FINITE:
            if fields[name] is not None:
                self._check_finite(name, fields[name])
        for key, array in (fields["multi_modal_inputs"] or {}).items():
            self._check_finite(f"multi_modal_inputs.{key}", array)

    def _check_finite(self, name: str, array: Array) -> None:
        """Raise NotFinite, naming the index, if an array holds NaN or an infinity."""
        if array.dtype.kind != "f" or bool(np.isfinite(array).all()):
            return
        index = [int(i) for i in np.argwhere(~np.isfinite(array))[0]]
        problem = f"is {array[tuple(index)]}: only finite numbers can be learned from"
        raise self._field_error(name, problem, str(index), NotFinite)

    def _reward_as_float(self, value: Any) -> float:
        try:
            if isinstance(value, str | bytes):
                raise TypeError("text is not a number")
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as e:
            raise self._field_error("reward", f"is {shown(value)}, expected a number") from e

    def _check_lengths(self) -> None:
        """Check the lengths of prompt and vectors. Cut vectors to the response, and add a missing action mask."""
        seq = len(self.tokens)
        prompt: Any = self.prompt_length
        if isinstance(prompt, np.integer):
            self.prompt_length = prompt = int(prompt)
        if not isinstance(prompt, int) or isinstance(prompt, bool):
            raise self._field_error("prompt_length", f"is {shown(prompt)}, expected a number of tokens")
        if self.experience_type == "dpo":
            if prompt != seq:
                problem = f"is {shown(prompt)}, but a preference pair's prompt is its {seq} tokens"
                raise self._field_error("prompt_length", problem)
            return
        if self.experience_type == "single_turn":
            # A truncated prompt may leave no room for a response; Trinity-RFT's class allows it too.
            least, most = 1, seq if self.truncate_status == "prompt_truncated" else seq - 1
        else:
            least, most = 0, seq
        if not least <= prompt <= most:
            problem = f"is {shown(prompt)}, expected {least} to {most} with tokens of shape ({seq},)"
            raise self._field_error("prompt_length", problem)
        response = seq - prompt
        self._cut_to_response(seq, prompt)
        if self.action_mask is None:
            self.action_mask = np.full(response, self.truncate_status != "prompt_truncated", dtype=np.bool_)
        fields = self.__dict__
        for name, (_, per_response) in VECTORS.items():
            if per_response and fields[name] is not None and len(fields[name]) != response:
                raise self._field_error(name, f"has shape {fields[name].shape}, but the response has {response} tokens "
                                f"(tokens of shape ({seq},), prompt_length {prompt})")

    def _cut_to_response(self, seq: int, prompt: int) -> None:
        """Cut logprobs and action mask to the response if they cover all tokens (logprobs: or all but the first)."""
        fields = self.__dict__
        for name, lengths in (("logprobs", (seq, seq - 1)), ("action_mask", (seq,))):
            array = fields[name]
            if array is not None and len(array) != seq - prompt and len(array) in lengths:
                warning = "Experience: %s given for more tokens than the response has: the part of the response is kept"
                _warn_once(warning, name)
                covered_from = seq - len(array)  # token at which the vector begins
                fields[name] = array[prompt - covered_from :]

    # --- comparison and display -------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Experience):
            return NotImplemented
        own, theirs = self.__dict__, other.__dict__
        return own.keys() == theirs.keys() and all(_is_equal(own[name], theirs[name]) for name in own)

    def __repr__(self) -> str:
        return (f"Experience({self.eid}, {self.experience_type}, {len(self.tokens)} tokens of which "
                f"{self.prompt_length} prompt, reward={self.reward})")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON, without arrays and without fields that are None."""
        data: dict[str, Any] = {
            "eid": self.eid.to_dict(), "type": self.experience_type, "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length, "info": self.info, "metrics": self.metrics,
        }
        names = ("prompt_text", "response_text", *JSON, "reward", "truncate_status")
        return data | {name: self.__dict__[name] for name in names if self.__dict__[name] is not None}

    # --- serialisation ----------------------------------------------------------------------------------------------
    def serialize(self) -> bytes:
        """Return a payload with this experience alone. Raises DataError as `validate`."""
        return self.serialize_many([self])

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        """Return the only experience of a payload. Raises CorruptPayload, or DataError if it holds more or none."""
        experiences = cls.deserialize_many(data)
        if len(experiences) != 1:
            raise DataError(f"this payload holds {len(experiences)} experiences, not one: "
                            "use Experience.deserialize_many")
        return experiences[0]

    @classmethod
    def serialize_many(cls, experiences: Sequence[Experience]) -> bytes:
        """Return a payload with these experiences. Equal ones give equal bytes. Raises DataError as `validate`."""
        for e in experiences:
            e.validate()
        items = [e.item() for e in experiences]
        return encode(items, columns_of([e.__dict__ for e in experiences]))

    def item(self) -> dict[str, Any]:
        """Return the JSON that a payload holds of this experience beside its arrays. The experience must be valid."""
        eid = self.eid
        return item_of(self.__dict__, self._as_json("eid", [eid.batch, eid.task, eid.run, eid.step, eid.suffix], list))

    @property
    def version_spans(self) -> list[tuple[int, int, int]]:
        """Spans (version, start, end) of the response that each version of the weights made; [] if unknown."""
        return version_spans(self.info)

    @property
    def adapter_spans(self) -> list[tuple[str, int, int, int]]:
        """Spans (adapter, version, start, end) of the response that each LoRA adapter made; [] if none did."""
        return [(span[0], span[1], span[2], span[3]) for span in listed(self.info, "adapter_spans")
                if isinstance(span, list) and [type(part) for part in span] == [str, int, int, int]]

    @property
    def splices(self) -> list[int]:
        """Offsets in the response at which a later attempt continued the tokens of a lost one."""
        return [n for n in listed(self.info, "splices") if type(n) is int]

    @property
    def model_versions(self) -> tuple[Any, Any]:
        """Oldest and newest version of the weights that made any of the tokens; None if unknown."""
        return model_versions(self.info)

    @classmethod
    def deserialize_many(cls, data: bytes, first: int = 0, count: int | None = None) -> list[Self]:
        """Return `count` experiences of a payload from number `first` on (None: all), with writable arrays.

        Raises DataError for a negative number. Raises CorruptPayload for invalid bytes, for too few experiences, and
        for a payload that refers to others, which only `read_experiences` can read.
        """
        if first < 0 or (count is not None and count < 0):
            raise DataError(f"can't read {count} experiences from number {first} on: both numbers must be 0 or more")
        with decoding():
            payload, decoder = Payload(bytearray(data)), Decoder()
            decoder.add(payload, payload.part(first, count), {})
            return cls.of_fields(fields_of(decoder.decoded()))

    @classmethod
    def of_fields(cls, all_fields: Iterable[dict[str, Any]]) -> list[Self]:
        """Return experiences with these fields, without checks, since a payload holds only checked fields."""
        experiences = []
        for fields in all_fields:
            experience = cls.__new__(cls)
            experience.__dict__ = fields
            experiences.append(experience)
        return experiences


def group_by(experiences: Iterable[Experience], id_type: Literal["task", "run", "step"]) -> dict[str, list[Experience]]:
    """Group experiences by the `tid`, `rid` or `sid` of their eid, in order of appearance. Raises DataError."""
    attribute = {"task": "tid", "run": "rid", "step": "sid"}.get(id_type)
    if attribute is None:
        raise DataError(f"can't group by {id_type!r}: use task, run or step")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, attribute), []).append(experience)
    return groups


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and same_array(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
