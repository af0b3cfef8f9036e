"""Translation of prompt and sampling settings from TRL's configs to `rollout_args` and `workflow_args`."""

from __future__ import annotations

from typing import Any

from trinity_es.events.errors import ConfigError
from trinity_es.integrations.answers import ANSWERS, PROMPTS

__all__ = ["sampling_args", "template_args"]

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "repetition_penalty": "repetition_penalty", "max_completion_length": "max_tokens"}
"""{field of TRL's config: name in `rollout_args`}."""
GENERATION = {**{name: name for name in (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop", "ignore_eos", "seed",
)}, "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""{key of `generation_kwargs` (vLLM's or transformers' name): name in `rollout_args`}."""


def sampling_args(args: Any) -> dict[str, Any]:
    """Return the `rollout_args` for a config of TRL. Raises ConfigError for a setting that the engines don't have."""
    sampling = {name: getattr(args, field, None) for field, name in SAMPLING.items()}
    for name, value in (getattr(args, "generation_kwargs", None) or {}).items():
        if name == "do_sample" and value is True:
            continue
        if name not in GENERATION:
            raise ConfigError(
                f"generation_kwargs of the trainer's config has {name}={value!r}, which the engines don't know: leave "
                f"it out; known are {', '.join(GENERATION)}"
            )
        sampling[GENERATION[name]] = value
    if sampling["top_k"] == 0:  # TRL's value for all tokens
        sampling["top_k"] = -1
    return {name: value for name, value in sampling.items() if value is not None}


def template_args(workflow: Any, args: Any) -> dict[str, Any]:
    """Return `workflow_args` with the `chat_template_kwargs` of TRL's config; {} if it has none.

    Raises ConfigError for a workflow that renders chats itself.
    """
    template = getattr(args, "chat_template_kwargs", None)
    if not template:
        return {}
    if workflow not in (PROMPTS, ANSWERS):
        raise ConfigError(
            f"the trainer's config has chat_template_kwargs, which don't reach the workflow {workflow}: set them for "
            "the engines instead (vLLM's default_chat_template_kwargs, in explorer.rollout_model.server_args), or use "
            "the default workflow"
        )
    return {"chat_template_kwargs": dict(template)}
