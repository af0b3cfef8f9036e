"""The parts of vLLM that we use, read from a release's sources by `ast`, without importing or installing vLLM.

`python -m tests.helpers.vllm_source FOLDER` writes `tests/data/vllm/RELEASE.txt`, FOLDER being an unpacked wheel
(`pip download --no-deps vllm==RELEASE`). A line is a name with all parameters of a function (`=` marks a default), or
with those fields of a class that we use.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.paths import ROOT

RECORDS = ROOT / "tests" / "data" / "vllm"
_TRANSFER = "vllm.distributed.weight_transfer"
_LAYERS = "vllm.model_executor.model_loader.reload.layerwise"
_LLM = "vllm.v1.engine.async_llm:AsyncLLM"

USED: dict[str, tuple[str, str]] = {
    # --- requests
    f"{_LLM}.generate": ("", "prompt sampling_params request_id lora_request"),
    "vllm:SamplingParams": ("", ""),
    "vllm.sampling_params:SamplingParams": (
        "", "n temperature top_p top_k max_tokens logprobs prompt_logprobs seed stop ignore_eos min_tokens min_p "
        "presence_penalty frequency_penalty repetition_penalty structured_outputs output_kind detokenize flat_logprobs",
    ),
    "vllm.sampling_params:StructuredOutputsParams": ("", "json json_object"),
    "vllm.sampling_params:RequestOutputKind": ("", "DELTA FINAL_ONLY"),
    "vllm.inputs.engine:tokens_input": ("", "prompt_token_ids"),
    "vllm.outputs:RequestOutput": ("", ""),
    "vllm.outputs:RequestOutput.__init__": ("", "request_id prompt prompt_token_ids prompt_logprobs outputs finished"),
    "vllm.outputs:CompletionOutput": ("", "index text token_ids logprobs finish_reason cumulative_logprob"),
    "vllm.outputs:WeightVersionSpan": ("0.32", "version start end"),
    "vllm.logprobs:FlatLogprobs": ("", "start_indices token_ids logprobs"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("", ""),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request": ("", "tokenizer request"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update": ("", "new_token_ids stop_terminated"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.get_next_output_text": ("", "finished delta"),
    "vllm.lora.request:LoRARequest": ("", "lora_name lora_int_id lora_path"),
    f"{_LLM}.add_lora": ("", "lora_request"),
    f"{_LLM}.remove_lora": ("", "lora_id"),
    # --- an engine's life
    "vllm:__version__": ("", ""),
    "vllm.platforms:current_platform": ("", ""),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("", ""),
    "vllm.engine.arg_utils:EngineArgs": (
        "", "model dtype seed gpu_memory_utilization tensor_parallel_size enforce_eager logprobs_mode max_logprobs "
        "generation_config disable_log_stats worker_extension_cls max_model_len reasoning_parser enable_lora "
        "max_lora_rank max_loras max_cpu_loras weight_transfer_config use_tqdm_on_load",
    ),
    _LLM: ("", ""),
    f"{_LLM}.from_engine_args": ("", "engine_args stat_loggers"),
    f"{_LLM}.shutdown": ("", ""),
    f"{_LLM}.errored": ("", ""),
    f"{_LLM}.is_running": ("", ""),
    f"{_LLM}.is_sleeping": ("", ""),
    f"{_LLM}.get_tokenizer": ("", ""),
    f"{_LLM}.get_supported_tasks": ("", ""),
    "vllm.v1.metrics.stats:SchedulerStats": (
        "", "num_running_reqs num_waiting_reqs kv_cache_usage prefix_cache_stats",
    ),
    "vllm.v1.metrics.stats:PrefixCacheStats": ("", "preempted_queries preempted_hits"),
    # --- a change of weights
    f"{_LLM}.pause_generation": ("", "mode clear_cache"),
    f"{_LLM}.resume_generation": ("", ""),
    f"{_LLM}.collective_rpc": ("", "method args kwargs"),
    f"{_LLM}.update_weight_version": ("0.32", "new_version"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": ("", "weights_path"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights": ("0.32", "weights_path"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": ("", ""),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model": ("", ""),
    f"{_LAYERS}:get_layerwise_info": ("", "layer"),
    f"{_LAYERS}:_place_kernel_tensors": ("", "layer info"),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": ("", "kernel_tensors"),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.can_load": ("", ""),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.reset": ("", ""),
    "vllm.config:WeightTransferConfig": ("", "backend"),
    f"{_LLM}.init_weight_transfer_engine": ("", "request"),
    f"{_LLM}.start_weight_update": ("0.32", ""),
    f"{_LLM}.update_weights": ("", "request"),
    f"{_LLM}.finish_weight_update": ("0.32", ""),
    f"{_LLM}.shutdown_weight_transfer_engine": ("0.32", ""),
    f"{_TRANSFER}:base": ("", ""),
    f"{_TRANSFER}.base:WeightTransferInitRequest": ("", "init_info"),
    f"{_TRANSFER}.base:WeightTransferUpdateRequest": ("", "update_info"),
    f"{_TRANSFER}.base:WeightTransferInitInfo": ("", ""),
    f"{_TRANSFER}.factory:WeightTransferEngineFactory": ("", ""),
    f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine": ("", "name module_path_or_cls"),
    f"{_TRANSFER}.nccl_engine:NCCLWeightTransferEngine": ("", ""),
    f"{_TRANSFER}.nccl_engine:NCCLWeightTransferEngine.init_transfer_engine": ("", "init_info"),
    f"{_TRANSFER}.nccl_engine:NCCLWeightTransferEngine.receive_weights": ("0.32", "update_info"),
    f"{_TRANSFER}.nccl_engine:NCCLWeightTransferInitInfo": ("", "master_address master_port rank_offset world_size"),
    f"{_TRANSFER}.nccl_engine:NCCLWeightTransferUpdateInfo": ("", "names dtype_names shapes"),
    f"{_TRANSFER}.base:WeightTransferEngine.parse_update_info": ("", "update_dict"),
    f"{_TRANSFER}.base:WeightTransferEngine.update_weights": ("0.32", "update_info"),
    "vllm.distributed.utils:StatelessProcessGroup": ("", ""),
    "vllm.distributed.utils:StatelessProcessGroup.create": ("", "host port rank world_size"),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator": ("", ""),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__": ("", "group device"),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast": ("", "tensor src stream"),
    # --- its HTTP server
    "vllm.entrypoints.launchers.app:build_app": ("0.32", "args supported_tasks model_config"),
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": (
        "0.32", "engine_client state args supported_tasks"),
    "vllm.entrypoints.openai.api_server:build_app": ("", "args supported_tasks model_config"),
    "vllm.entrypoints.openai.api_server:init_app_state": ("", "engine_client state args supported_tasks"),
    "vllm.entrypoints.common.cli_args:make_arg_parser": ("0.33", "parser"),
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ("0.32 - 0.32", "parser"),
    "vllm.entrypoints.openai.cli_args:make_arg_parser": ("0 - 0.23", "parser"),
    "vllm.utils.argparse_utils:FlexibleArgumentParser": ("", ""),
    "vllm.renderers.chat_utils:load_chat_template": ("0.32", "chat_template"),
    "vllm.entrypoints.chat_utils:load_chat_template": ("0 - 0.23", "chat_template"),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models": ("", ""),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateLogProb": ("0.32", "token_id logprob"),
    # --- what it answers
    "vllm.exceptions:VLLMClientError": ("0.32", ""),
    "vllm.exceptions:RetryableRequestError": ("0.32", ""),
    "vllm.v1.engine.core:EngineCoreProc.pause_generation": ("0.33", "mode clear_cache"),
    "vllm.outputs:RequestError.to_exception": ("0.33", ""),
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": ("0.33", "return_weight_versions"),
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest": ("0.33", "return_weight_versions"),
}
"""Name -> (releases that have it in this form, arguments that we pass or fields that we use)."""


@cache
def _parsed(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text()) if file.is_file() else None


def _module(folder: Path, module: str) -> tuple[ast.Module | None, bool]:
    """Return a module's syntax tree, or None, and True if the module is a package."""
    file = folder.joinpath(*module.split("."))
    package = _parsed(file / "__init__.py")
    return (package, True) if package is not None else (_parsed(file.with_suffix(".py")), False)


def _found(folder: Path, module: str, name: str) -> ast.AST | None:
    """Return the definition of a name in a module, following imports."""
    tree, package = _module(folder, module)
    if tree is None:
        return None
    if _module(folder, f"{module}.{name}")[0] is not None:
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(isinstance(t, ast.Name) and t.id == name
                                                                for t in targets):
            return node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            origin = next(a.name for a in node.names if (a.asname or a.name) == name)
            up = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            return _found(folder, ".".join([*up, *([node.module] if node.module else [])]), origin)
    return None


def _member(folder: Path, module: str, owner: ast.ClassDef, name: str) -> ast.AST | None:
    """Return the definition of a class's member, which may be inherited from a class of the same module."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(isinstance(t, ast.Name) and t.id == name
                                                                for t in targets):
            return node
    for base in owner.bases:
        above = _found(folder, module, base.id) if isinstance(base, ast.Name) else None
        if isinstance(above, ast.ClassDef) and (found := _member(folder, module, above, name)) is not None:
            return found
    return None


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    for i, argument in enumerate(plain):
        default = i >= len(plain) - len(given.defaults)
        if argument.arg not in ("self", "cls"):
            yield argument.arg + "=" * default
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield argument.arg + "=" * (value is not None)
    if given.kwarg is not None:
        yield "**"


def written(folder: Path) -> str:
    """Return a line for each name of `USED` as a release has it. `folder` contains the package `vllm`."""
    lines = []
    for used, (_, wanted) in sorted(USED.items()):
        module, _, path = used.partition(":")
        name, _, member = path.partition(".")
        node = _found(folder, module, name)
        if member:
            node = _member(folder, module, node, member) if isinstance(node, ast.ClassDef) else None
        if node is None:
            continue
        has: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has = list(_signature(node))
        elif isinstance(node, ast.ClassDef):
            has = [field for field in wanted.split() if _member(folder, module, node, field) is not None]
        lines.append(f"{used} {' '.join(has)}".rstrip())
    return "\n".join(lines) + "\n"


def release(folder: Path) -> str:
    """Return the version in the sources of a release."""
    tree = _parsed(folder / "vllm" / "_version.py")
    found = [node.value for node in tree.body if isinstance(node, ast.Assign)
             and any(isinstance(t, ast.Name) and t.id in ("version", "__version__") for t in node.targets)]
    [value] = {str(v.value) for v in found if isinstance(v, ast.Constant)}
    return value


def alternatives(tree: ast.AST) -> Iterator[list[set[str]]]:
    """Yield each import of vLLM in our source, as a list of the alternatives that it tries."""
    if isinstance(tree, ast.Try) and any(map(_imports, tree.body)):
        yield _ways(tree)
    elif found := _imports(tree):
        yield [found]
    else:
        for child in ast.iter_child_nodes(tree):
            yield from alternatives(child)


def _ways(statement: ast.AST) -> list[set[str]]:
    if not isinstance(statement, ast.Try):
        return [_imports(statement)]
    bodies = [statement.body, *(handler.body for handler in statement.handlers)]
    return [set[str]().union(*way) for body in bodies for way in itertools.product(*map(_ways, body))]


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {f"{a.name}:__version__" for a in node.names if a.name.partition(".")[0] == "vllm"}
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm" and not node.level:
        return {f"{node.module}:{a.name}" for a in node.names}
    return set()


if __name__ == "__main__":
    (RECORDS / f"{release(Path(sys.argv[1]))}.txt").write_text(written(Path(sys.argv[1])))
