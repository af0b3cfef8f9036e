"""The user's config: `Config`, read from a file with `load_config` and checked whole."""

from trinity_es.config.config import Config, load_config

__all__ = ["Config", "load_config"]
