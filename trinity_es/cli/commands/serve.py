"""The command `serve`: an OpenAI-compatible proxy before the engines, which keeps each answer as an experience."""

from __future__ import annotations

import asyncio
import atexit
from functools import partial

from trinity_es.cli.common import ConfigArgument, JsonOption, SetOption, note, print_json, read_config
from trinity_es.cli.run_in_view import play_part
from trinity_es.client.teardown import end_system
from trinity_es.run.explorer import Explorer
from trinity_es.serve.proxy import Proxy

__all__ = ["serve"]


def serve(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Serve an OpenAI-compatible API with the engines of a config until Ctrl-C, and record every answer as experience.

    Any OpenAI client can use chat, completions, streams and models; the address and key for it are printed. Rewards
    for answers may come at any time: POST /feedback with {"msg_ids": [ids of responses], "reward": 1.0, "task_id":
    "..."}. POST /commit sends the rewarded answers through the pipeline. New weights (`sync_weights`) are loaded
    engine by engine, while at least explorer.min_running_model_num engines keep answering.

    Starts the actor system if none runs, and ends it at the end. It sets mode=serve, whatever the config says.

    \b
    Example:
      trinity-es serve config.yaml --set explorer.proxy_port=8010 --set explorer.rollout_model.engine_num=2
    """
    settings = read_config(config, [*(overrides or []), "mode=serve"])
    explorer = Explorer(settings)
    note("starting…")
    signals: list[int] = []
    try:
        serve_requests = partial(explorer.serve, partial(_print_access, as_json))
        asyncio.run(play_part(explorer, serve_requests, signals))
    except asyncio.CancelledError:
        if not signals:
            raise
    except BaseException:
        if explorer.owns_system:  # again at exit: on Ctrl-C a thread may still be starting the system
            atexit.register(end_system, settings)
        raise
    finally:
        if explorer.owns_system:
            end_system(settings)


def _print_access(as_json: bool, proxy: Proxy) -> None:
    model = proxy.config.explorer.rollout_model.model_path or "rollout"
    if as_json:
        print_json({"base_url": proxy.base_url, "api_key": proxy.api_key, "model": model})
    else:
        root = proxy.base_url.removesuffix("/v1")
        print(f"serving at {proxy.base_url}\n")
        print(f"  from openai import OpenAI\n  client = OpenAI(base_url={proxy.base_url!r}, api_key={proxy.api_key!r})")
        print(f"  answer = client.chat.completions.create(model={model!r}, messages=[{{'role': 'user', 'content': "
              "'Hello'}])\n")
        print(f"reward  POST {root}/feedback {{\"msg_ids\": [answer.id], \"reward\": 1.0}}, later POST {root}/commit")
        print("end     Ctrl-C", flush=True)
