"""Keys of Trinity-RFT's config that are not keys here, and what stands in their place.

`FOREIGN` answers each with a clause for the error ("it is explorer.places here", or why there is none); a section that
has one answer for all of its keys stands without them. `FOREIGN_VALUES` does the same for values. Knows no pydantic;
`trinity_es.config.config` hands both to `trinity_es.config.explain.explain`. docs/TRINITY_RFT_KEYS.md is printed by
`python -m trinity_es.config.trinity_rft`.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["FOREIGN", "FOREIGN_VALUES", "markdown"]

_TASKSET = "buffer.explorer_input.tasksets[]"
_ROLLOUT = "explorer.rollout_model"


def _at(key: str, note: str = "") -> str:
    return f"it is {key} here" + (f": {note}" if note else "")


def _none(reason: str) -> str:
    return f"there is none here: {reason}"


_KEPT = "every experience is in the store; buffer.pipeline.outputs writes a copy where you want it"
_SET_BY_ITSELF = _none("it was never to be set by hand")

_TOP: Final = {
    "group": _none("project and name say where a run lies"),
    "checkpoint_job_dir": _none("it is always <checkpoint_root_dir>/<project>/<name>"),
    "ray_namespace": _at("system.address and system.port", "there is no Ray"),
    "continue_from_checkpoint": _none(
        "a run goes on from its log by itself (trinity-es resume); give another name to begin anew"
    ),
    "ignore_validator_suggestions": _none("every problem of a config is an error"),
    "stages": _none("write one config a stage, and run one after the other with trinity-es run"),
    "cluster": _at(f"{_ROLLOUT}.engine_num and {_ROLLOUT}.tensor_parallel_size", "nothing is shared out by Ray"),
    "service": _none("Data-Juicer is run before, or called in an operator of yours (buffer.pipeline.operators)"),
    "log": _at("system.log_dir", "each process has a text log there"),
    # buffer
    "buffer.total_epochs": _at(f"{_TASKSET}.epochs", "each taskset has its own"),
    "buffer.total_steps": _at("total_steps"),
    "buffer.train_batch_size": _none(
        "a trainer gets whole batches (buffer.batch_size tasks of repeat_times runs), or as many experiences as it "
        "asks RolloutClient.take_experiences for"
    ),
    "buffer.explorer_input.taskset": _at("buffer.explorer_input.tasksets", "a list, with one entry or more"),
    "buffer.explorer_input.default_workflow_type": _at(f"{_TASKSET}.workflow"),
    "buffer.explorer_input.default_eval_workflow_type": _at("buffer.explorer_input.eval_tasksets[].workflow"),
    "buffer.explorer_input.default_reward_fn_type": _at(f"{_TASKSET}.reward_fn"),
    "buffer.explorer_input.system_prompt": _at(f"{_TASKSET}.format.system_prompt"),
    "buffer.explorer_input.reply_prefix": _at(f"{_TASKSET}.format.reply_prefix"),
    "buffer.trainer_input": _none(
        "experiences lie in the store (store.url) until their batch was acknowledged and store.retention steps passed"
    ),
    "buffer.trainer_input.experience_buffer": _at("store.url", "experiences are kept beside the log, with their batch"),
    "buffer.trainer_input.experience_buffer.path": _at("buffer.pipeline.outputs", "for a copy of your own"),
    "buffer.trainer_input.experience_buffer.storage_type": _at("store.url", "a SQLite file, or PostgreSQL"),
    "buffer.trainer_input.experience_buffer.capacity": _at("buffer.queue.capacity"),
    "buffer.trainer_input.experience_buffer.max_read_timeout": _none("it is the timeout of the call that waits"),
    "buffer.trainer_input.experience_buffer.replay_buffer": _at("buffer.queue"),
    "buffer.trainer_input.experience_buffer.replay_buffer.enable": _none(
        "RolloutClient.take_experiences is always there, and reads as buffer.queue says"
    ),
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn": _at("buffer.queue.priority_fn"),
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args": _at("buffer.queue.priority_fn_args"),
    "buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time": _at("buffer.queue.reuse_cooldown_time"),
    "buffer.trainer_input.experience_buffer.replay_buffer_kwargs": _at("buffer.queue.priority_fn_args"),
    "buffer.trainer_input.experience_buffer.use_priority_queue": _at("buffer.queue.priority_fn"),
    "buffer.trainer_input.experience_buffer.reuse_cooldown_time": _at("buffer.queue.reuse_cooldown_time"),
    "buffer.trainer_input.experience_buffer.max_retry_times": _at("store.retry_for", "in seconds"),
    "buffer.trainer_input.experience_buffer.max_retry_interval": _at("store.retry_for", "in seconds"),
    "buffer.trainer_input.auxiliary_buffers": _none("your trainer class reads what else it learns from"),
    "buffer.trainer_input.sft_warmup_dataset": _none("train it first, with a trainer of your own (trainer.class)"),
    "buffer.trainer_input.sft_warmup_steps": _none("train it first, with a trainer of your own (trainer.class)"),
    "buffer.explorer_output": _SET_BY_ITSELF,
    "buffer.tokenizer_path": _SET_BY_ITSELF,
    "buffer.pad_token_id": _SET_BY_ITSELF,
    "buffer.cache_dir": _SET_BY_ITSELF,
    # data_processor
    "data_processor": _at("buffer.pipeline"),
    "data_processor.experience_pipeline": _at("buffer.pipeline"),
    "data_processor.experience_pipeline.operators": _at("buffer.pipeline.operators"),
    "data_processor.experience_pipeline.save_input": _none(_KEPT),
    "data_processor.experience_pipeline.input_save_path": _none(_KEPT),
    "data_processor.experience_pipeline.inputs": _none("an operator of yours reads what else it needs"),
    "data_processor.experience_pipeline.output": _at("buffer.pipeline.outputs"),
    "data_processor.task_pipeline": _none("prepare the file of tasks before, and name it in a taskset's path"),
    # algorithm
    "algorithm": _at("trainer.class and trainer.args", "the loss is the trainer's"),
    "algorithm.algorithm_type": _at(
        "buffer.pipeline.operators", "the advantage, such as grpo; the loss is the trainer's"
    ),
    "algorithm.repeat_times": _at(f"{_TASKSET}.repeat_times"),
    "algorithm.advantage_fn": _at("buffer.pipeline.operators", "the operator's name"),
    "algorithm.advantage_fn_args": _at("buffer.pipeline.operators[].args"),
    "algorithm.kl_penalty_fn": _at("buffer.pipeline.operators", "an operator of yours changes the reward"),
    "algorithm.kl_penalty_fn_args": _at("buffer.pipeline.operators[].args"),
    "algorithm.sample_strategy": _at("buffer.queue.priority_fn", "for take_experiences"),
    "algorithm.sample_strategy_args": _at("buffer.queue.priority_fn_args", "for take_experiences"),
    # model
    "model.critic_model_path": _at("trainer.args", "the critic is the trainer's"),
    "model.trust_remote_code": _at(f"{_ROLLOUT}.engine_args", "{trust_remote_code: true}"),
    "model.custom_chat_template": _none("save the model's folder with the chat template that you want"),
    "model.chat_template_path": _none("save the model's folder with the chat template that you want"),
    "model.temperature": _at(f"{_ROLLOUT}.temperature"),
    "model.top_p": _at(f"{_ROLLOUT}.top_p"),
    "model.top_k": _at(f"{_ROLLOUT}.top_k"),
    "model.logprobs": _at(f"{_ROLLOUT}.logprobs", "true or false"),
    "model.max_model_len": _at(f"{_ROLLOUT}.max_model_len"),
    "model.max_prompt_tokens": _at(f"{_ROLLOUT}.max_model_len", "what is left of it is the response's"),
    "model.max_response_tokens": _at(f"{_ROLLOUT}.max_response_tokens"),
    "model.min_response_tokens": _at(f"{_TASKSET}.rollout_args", "{min_tokens: ...}"),
    "model.enable_prompt_truncation": _none("a prompt that is too long fails its task, with kind data"),
    "model.repetition_penalty": _at(
        f"{_TASKSET}.rollout_args", "{repetition_penalty: ...}; logprobs are those after it"
    ),
    "model.enable_thinking": _none("say it in the chat template, or in the messages"),
    "model.rope_scaling": _at(f"{_ROLLOUT}.engine_args", "{hf_overrides: {rope_scaling: ...}}"),
    "model.rope_theta": _at(f"{_ROLLOUT}.engine_args", "{hf_overrides: {rope_theta: ...}}"),
    "model.lora_configs": _none("the trainer saves its adapters merged into the weights"),
    "model.fully_sharded_loras": _none("the trainer saves its adapters merged into the weights"),
    "model.max_cpu_loras": _none("the trainer saves its adapters merged into the weights"),
    "model.tinker": _at(f"{_ROLLOUT}.engine_type", "\"module:Class\" of an engine of yours"),
    "model.external_model": _at(f"{_ROLLOUT}.engine_type", "\"module:Class\" of an engine of yours"),
    # explorer
    "explorer.runner_per_model": _at("explorer.places", "one runner an engine runs so many units at once"),
    "explorer.runner_num": _at("explorer.places", "one runner an engine runs so many units at once"),
    "explorer.runner_prepare_concurrency": _none("all runners start at once"),
    "explorer.runner_prepare_max_retries": _at("system.restarts"),
    "explorer.env_vars": _none("set them where trinity-es is started: every process inherits them"),
    "explorer.max_inflight_batches": _at("synchronizer.max_inflight_batches"),
    "explorer.service_status_check_interval": _none("an engine tells when it is ready, and is not asked"),
    "explorer.db_url": _at("store.url"),
    "explorer.rollout_model.name": _none("its name is always rollout"),
    # trainer
    "trainer.name": _at("trainer.class"),
    "trainer.trainer_type": _at("trainer.class", "\"module:Class\", or null for a trainer that connects"),
    "trainer.total_steps": _at("total_steps"),
    "trainer.max_checkpoints_to_keep": _at("trainer.keep_checkpoints"),
    "trainer.save_hf_checkpoint": _none("checkpoints are always in Hugging Face format"),
    "trainer.enable_preview": _none("trinity-es show BATCH tells what was said, of every batch"),
    "trainer.trainer_config": _at("trainer.args"),
    "trainer.trainer_config_path": _at("trainer.args"),
    # monitor
    "monitor.enable_ray_timeline": _none("trinity-es export --trace draws any run, also one that has ended"),
    "monitor.cache_dir": _SET_BY_ITSELF,
    # synchronizer
    "synchronizer.explorer_sync_interval": _at("synchronizer.sync_interval"),
    "synchronizer.trainer_sync_interval": _at("synchronizer.sync_interval"),
    "synchronizer.group_name": _SET_BY_ITSELF,
    "synchronizer.wait_for_checkpoint": _at("synchronizer.sync_style", "fixed waits, fully_async does not"),
    "synchronizer.explorer_world_size": _SET_BY_ITSELF,
    "synchronizer.ray_namespace": _SET_BY_ITSELF,
}  # fmt: skip

_TRAINERS = (
    "trainer_strategy", "grad_clip", "use_dynamic_bsz", "use_remove_padding", "balance_batch", "critic_warmup",
    "max_token_len_per_gpu", "ulysses_sequence_parallel_size", "fix_actor_microbatch_loss_scale", "param_offload",
    "optimizer_offload", "grad_offload", "offload_policy", "save_strategy", "megatron", "trust_remote_code",
    "actor_grad_clip",
)
_OF_A_TASKSET: Final = {
    "storage_type": _none("what the path is says how it is read"),
    "default_workflow_type": _at("{}.workflow"),
    "default_eval_workflow_type": _at("{}.workflow", "an eval taskset has its own"),
    "default_reward_fn_type": _at("{}.reward_fn"),
    "subset_name": _at("{}.path", "one folder or file a subset"),
    "total_epochs": _at("{}.epochs"),
    "total_steps": _at("total_steps"),
    "batch_size": _at("buffer.batch_size"),
    "task_selector": _at("{}.data_selector", "the older name"),
    "mm_data_kwargs": _none("a workflow of yours reads images and videos from task.raw_task"),
    "max_retry_times": _none("a file that can't be read is an error at once"),
    "max_retry_interval": _none("a file that can't be read is an error at once"),
    "enable_progress_bar": _none("trinity-es run shows how far it is"),
    "index": _none("how far a taskset was read is in the log, and recovered from there"),
    "is_eval": _none("those in eval_tasksets are evals"),
    "ray_namespace": _none("there is no Ray"),
    "wrap_in_ray": _none("there is no Ray"),
    "tokenizer_path": _SET_BY_ITSELF,
    "schema_type": _SET_BY_ITSELF,
    "format.prompt_type": _none("your workflow makes messages of task.raw_task"),
    "format.system_prompt_key": _none("your workflow makes messages of task.raw_task"),
    "format.messages_key": _none("your workflow makes messages of task.raw_task"),
    "format.tools_key": _none("your workflow hands tools to model.chat"),
    "format.image_key": _none("a workflow of yours reads images and videos from task.raw_task"),
    "format.video_key": _none("a workflow of yours reads images and videos from task.raw_task"),
    "format.chosen_key": _none("your trainer class reads preference pairs"),
    "format.rejected_key": _none("your trainer class reads preference pairs"),
    "format.enable_concatenated_multi_turn": _none("MultiTurnWorkflow does it"),
    "format.chat_template": _none("save the model's folder with the chat template that you want"),
    "format.enable_thinking": _none("say it in the chat template, or in the messages"),
}
_OF_A_MODEL: Final = {
    "trust_remote_code": _at("{}.engine_args", "{{trust_remote_code: true}}"),
    "data_parallel_size": _at("{}.engine_num", "engines of their own"),
    "pipeline_parallel_size": _at("{}.engine_args", "{{pipeline_parallel_size: ...}}"),
    "enable_expert_parallel": _at("{}.engine_args", "{{enable_expert_parallel: true}}"),
    "gpu_per_engine": _at("{}.tensor_parallel_size"),
    "extra_engine_args": _at("{}.engine_args"),
    "use_v1": _none("there is no other vLLM any more"),
    "enable_prefix_caching": _at("{}.engine_args", "{{enable_prefix_caching: ...}}"),
    "enable_chunked_prefill": _at("{}.engine_args", "{{enable_chunked_prefill: ...}}"),
    "max_prompt_tokens": _at("{}.max_model_len", "what is left of it is the response's"),
    "min_response_tokens": _at(f"{_TASKSET}.rollout_args", "{{min_tokens: ...}}"),
    "enable_prompt_truncation": _none("a prompt that is too long fails its task, with kind data"),
    "repetition_penalty": _at(
        f"{_TASKSET}.rollout_args", "{{repetition_penalty: ...}}; logprobs are those after it"
    ),
    "ignore_eos": _at(f"{_TASKSET}.rollout_args", "{{ignore_eos: true}}"),
    "enable_multimodal": _none("text only so far"),
    "chat_template": _none("save the model's folder with the chat template that you want"),
    "enable_thinking": _none("say it in the chat template, or in the messages"),
    "enable_history": _none("model.chat returns each answer as an experience"),
    "enable_openai_api": _none("every model has it: model.get_openai_client()"),
    "enable_log_requests": _at("{}.engine_args", "{{enable_log_requests: true}}"),
    "base_port": _none("free ports are taken"),
    "api_key": _none("a key is made for each system, and the client that a workflow is given has it"),
    "enable_auto_tool_choice": _none("a workflow reads the tool calls from the answer's text"),
    "tool_call_parser": _none("a workflow reads the tool calls from the answer's text"),
    "reasoning_parser": _none("a workflow reads the reasoning from the answer's text"),
    "external_model_config": _at("{}.engine_type", "\"module:Class\" of an engine of yours"),
    "nnodes": _none("an engine has one machine"),
    "node_rank": _none("an engine has one machine"),
    "enable_return_routed_experts": _at("{}.engine_args", "{{enable_return_routed_experts: true}}"),
    "weight_sync_buffer_size": _none("vLLM's own weight transfer chooses it"),
    "enable_lora": _none("the trainer saves its adapters merged into the weights"),
    "enable_runtime_lora_updating": _none("the trainer saves its adapters merged into the weights"),
    "lora_modules": _none("the trainer saves its adapters merged into the weights"),
    "lora_kwargs": _none("the trainer saves its adapters merged into the weights"),
    "rope_scaling": _at("{}.engine_args", "{{hf_overrides: {{rope_scaling: ...}}}}"),
    "rope_theta": _at("{}.engine_args", "{{hf_overrides: {{rope_theta: ...}}}}"),
    **dict.fromkeys(
        ("bundle_indices", "engine_id", "ray_namespace", "ray_actor_name", "sync_method", "checkpoint_job_dir",
         "cuda_visible_devices"),
        _SET_BY_ITSELF,
    ),
}  # fmt: skip


def _table() -> dict[str, str]:
    table = dict(_TOP)
    table |= {f"trainer.{name}": _at("trainer.args", "an argument of your trainer class") for name in _TRAINERS}
    groups = {"tasksets[]": "tasksets[]", "taskset": "tasksets[]", "eval_tasksets[]": "eval_tasksets[]"}
    for theirs, ours in groups.items():
        here = f"buffer.explorer_input.{ours}"
        table |= {
            f"buffer.explorer_input.{theirs}.{name}": text.replace("{}", here) for name, text in _OF_A_TASKSET.items()
        }
    table["buffer.explorer_input.eval_tasksets[].task_selector"] = _none("an eval plays every row once")
    for here in (_ROLLOUT, "explorer.auxiliary_models[]"):
        table |= {f"{here}.{name}": text.format(here) for name, text in _OF_A_MODEL.items()}
    return table


FOREIGN: Final = _table()
"""Key of Trinity-RFT (`[]` stands for any index) -> a clause that says what is in its place here."""

FOREIGN_VALUES: Final = {
    ("synchronizer.sync_method", "online"): "it is nccl here",
    ("synchronizer.sync_method", "offline"): "it is checkpoint here",
    ("synchronizer.sync_style", "dynamic_by_trainer"): "it is trainer_driven here",
    ("synchronizer.sync_style", "dynamic_by_explorer"): "it is fixed here, with sync_interval and sync_offset",
    ("synchronizer.sync_style", "explorer_driven"): "it is fixed here, with sync_interval and sync_offset",
    ("monitor.monitor_type", "tensorboard"): "write [tensorboard]",
    ("monitor.monitor_type", "wandb"): "write [wandb]",
    ("monitor.monitor_type", "mlflow"): "write the module:Class of a monitor of yours",
    ("monitor.monitor_type", "swanlab"): "write the module:Class of a monitor of yours",
    ("explorer.rollout_model.engine_type", "vllm_async"): "it is vllm here",
    ("explorer.rollout_model.engine_type", "sglang"): "write the module:Class of an engine of yours",
    ("explorer.rollout_model.engine_type", "tinker"): "write the module:Class of an engine of yours",
    ("explorer.rollout_model.engine_type", "external"): "write the module:Class of an engine of yours",
    ("explorer.rollout_model.logprobs", "0"): "write true",
}  # fmt: skip
"""(key, value as text) of Trinity-RFT's that a key of the same name refuses here -> what to write."""


def markdown() -> str:
    """Return the page of all of them; keys that stand in several places once."""
    again = (".taskset.", ".eval_tasksets[].", ".auxiliary_models[].")
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in FOREIGN.items() if not any(a in key for a in again))
    values = "\n".join(f"| `{key}: {value}` | {text} |" for (key, value), text in FOREIGN_VALUES.items())
    return (
        "# Keys of Trinity-RFT's config\n\nThose that have another name here, or none; the others mean the same. An "
        "unknown key gives an error that says the same as this page. A key of a section that stands without its keys "
        "has the section's answer. The guide is [FROM_TRINITY_RFT.md](FROM_TRINITY_RFT.md).\n\nThis page is printed by "
        f"`python -m trinity_es.config.trinity_rft`.\n\n| theirs | here |\n|---|---|\n{rows}\n{values}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(markdown())
