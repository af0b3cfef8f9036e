"""Datasets of the Hugging Face hub, read by the package `datasets`, each at one commit.

A run resolves the revision to a commit when it begins, and records the commit in the log, so a resumed run reads the
same one. If the hub is unreachable, `datasets` would take the newest cached commit. This module accepts only the
requested commit, and reads it from the cache without a request if it is there. No code of a dataset runs. `HF_HOME`,
`HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` apply as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.errors import TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.row_checks import CHECKED_ROWS, TableRows

__all__ = ["HubRows"]

MAIN = "main"
DEFAULT = "default"
RESOLVE_SECONDS = 30.0
SHOWN = 400
"""Maximum number of characters of another package's error that an error quotes."""
_COMMIT = re.compile(r"[0-9a-f]{40}")

_logger = logging.getLogger(__name__)


class HubRows:
    """Rows of one split of a dataset, mapped into memory. `revision` is the commit, `subset` the subset's name.

    Commit and subset come from `recorded`, else from the config; the defaults are the main branch and the default
    subset. Raises TasksetError, with the remedy, if the dataset or a package is missing or the hub is unreachable.
    """

    def __init__(self, config: TasksetConfig, recorded: TasksetSource | None = None) -> None:
        self._config, self._subset = config, (recorded and recorded.subset) or config.subset
        self.repository = config.path.partition(":")[2]
        self._datasets, self._hub = _packages(config)
        self.revision = recorded.revision if recorded else self._resolve_commit()
        self._source = f"{config.path}@{self.revision[:12]} {config.split}"
        with self._translated_errors(self.revision):
            builder = self._builder()
            self.subset = str(builder.config.name)
            self._rows = builder.as_dataset(split=config.split).with_format("arrow")
        self._read = TableRows(self._source, self._rows.data.table.schema, config)
        for first in range(0, len(self._rows), CHECKED_ROWS):
            self._read.check(self._rows[first : first + CHECKED_ROWS], first)
        if not len(self._rows):
            raise TasksetError(f"{self._source} is empty: a taskset has at least one row")

    @staticmethod
    def check(config: TasksetConfig) -> None:
        """Raise TasksetError unless the package `datasets` is installed."""
        _packages(config)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._read.row(self._rows[row : row + 1], 0, row) for row in rows]

    # --- the commit -------------------------------------------------------------------------------------------------
    def _resolve_commit(self) -> str:
        """Return the commit of the config's revision; if the hub is unreachable, the commit in the cache."""
        revision = self._config.revision or MAIN
        if _COMMIT.fullmatch(revision):
            return revision
        api = self._hub.HfApi()
        try:
            with self._translated_errors(revision):
                commit = api.dataset_info(self.repository, revision=revision, timeout=RESOLVE_SECONDS).sha
        except _Unreachable as e:
            last_commit = self._cached_commit(revision)
            if last_commit is None:
                raise
            _logger.warning("taskset %s: %s. It begins with commit %s, the last that the cache knows as %s",
                            self._config.name, e.reason, last_commit, revision)
            return last_commit
        with contextlib.suppress(Exception):  # so the cache has it when the hub is unreachable
            api.hf_hub_download(self.repository, "README.md", repo_type="dataset", revision=revision)
        return str(commit)

    def _cached_commit(self, revision: str) -> str | None:
        """Return the commit that this machine's hub cache has for a branch or tag; None without an entry."""
        folder = importlib.import_module("huggingface_hub.file_download").repo_folder_name(
            repo_id=self.repository, repo_type="dataset")
        try:
            text = (Path(self._hub.constants.HF_HUB_CACHE) / folder / "refs" / revision).read_text().strip()
        except OSError:
            return None
        return text if _COMMIT.fullmatch(text) else None

    # --- its rows ---------------------------------------------------------------------------------------------------
    def _builder(self) -> Any:
        """Return a dataset builder for the commit; its files are on this machine, from the cache if possible."""
        cached_folders = self._cache_folders()
        subset = self._subset or DEFAULT  # a subset of this name is the default one
        if subset in cached_folders:
            return self._cached_builder(cached_folders[subset])
        try:
            builder = self._datasets.load_dataset_builder(self.repository, self._subset, revision=self.revision)
            # Without the hub, `datasets` takes any cached revision.
            if isinstance(builder, _cache_builder_class()) or builder.hash != self.revision:
                raise ConnectionError(f"the hub can't be reached, and the cache of `datasets` has commit "
                                      f"{builder.hash}, subset {builder.config.name}, not commit {self.revision}: "
                                      "try again later")
        except (_hub_errors().HTTPError, ConnectionError, TimeoutError):
            if self._subset is not None or len(cached_folders) != 1:
                raise
            [(name, folder)] = cached_folders.items()
            _logger.warning("taskset %s: the hub can't be asked which subset of %s is the default one: it is %s, the "
                            "only one in the cache", self._config.name, self._config.path, name)
            return self._cached_builder(folder)
        builder.download_and_prepare()
        return builder

    def _cached_builder(self, folder: Path) -> Any:
        """Return a dataset builder that reads this folder of the cache, without a request."""
        config_name, version = folder.parts[-3:-1]
        return _cache_builder_class()(repo_id=self.repository, dataset_name=self.repository.rpartition("/")[2],
                        config_name=config_name, version=version, hash=self.revision)

    def _cache_folders(self) -> dict[str, Path]:
        """Return {subset: its cache folder} for the commit."""
        owner, _, name = self.repository.rpartition("/")
        name = importlib.import_module("datasets.naming").camelcase_to_snakecase(name)
        root = Path(self._datasets.config.HF_DATASETS_CACHE) / (f"{owner}___{name}" if owner else name)
        return {path.parts[-4]: path.parent for path in root.glob(f"*/*/{self.revision}/dataset_info.json")}

    @contextlib.contextmanager
    def _translated_errors(self, revision: str) -> Iterator[None]:
        """Turn errors of `datasets` and `huggingface_hub` into TasksetErrors that say what to do."""
        errors = _hub_errors()
        dataset = f"taskset {self._config.name}: {self._config.path} at {revision}"
        try:
            yield
        except errors.GatedRepoError as e:
            raise TasksetError(f"{dataset} is gated: ask for access on its page, then set HF_TOKEN "
                               f"({_error_summary(e)})") from e
        except errors.RevisionNotFoundError as e:
            raise TasksetError(f"{dataset}: there is no such revision: name a branch, a tag or a commit") from e
        except errors.RepositoryNotFoundError as e:
            raise TasksetError(f"{dataset}: there is no such dataset, or it is private: check its name, or set "
                               "HF_TOKEN") from e
        except (errors.HTTPError, ConnectionError, TimeoutError) as e:  # the first is any error of its HTTP client
            offline = self._hub.constants.HF_HUB_OFFLINE
            reason = "HF_HUB_OFFLINE is set" if offline else f"the hub can't be reached ({_error_summary(e)})"
            arguments = ", ".join(map(repr, filter(None, (self.repository, self._subset))))
            fetch_call = f"datasets.load_dataset({arguments}, revision={revision!r})"
            raise _Unreachable(dataset, reason, fetch_call) from e
        except (OSError, ValueError, RuntimeError, self._datasets.exceptions.DatasetsError) as e:
            raise TasksetError(f"{dataset} can't be read ({_error_summary(e)}): check its subset and its split") from e


class _Unreachable(TasksetError):
    """The hub is unreachable, and the cache lacks a usable copy."""

    def __init__(self, dataset: str, reason: str, fetch_call: str) -> None:
        super().__init__(
            f"{dataset} is not in the cache of this machine, and {reason}: fetch it where there is a network, by "
            f"`{fetch_call}`, with the HF_HOME of this machine; or give a folder that `save_to_disk` wrote as path"
        )
        self.reason = reason


def _error_summary(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= SHOWN else text[:SHOWN] + ' ...'}"


def _hub_errors() -> Any:
    return importlib.import_module("huggingface_hub.errors")


def _cache_builder_class() -> Any:
    return importlib.import_module("datasets.packaged_modules.cache.cache").Cache


def _packages(config: TasksetConfig) -> tuple[Any, Any]:
    """Return the modules datasets and huggingface_hub. Raises TasksetError if one is missing."""
    try:
        return importlib.import_module("datasets"), importlib.import_module("huggingface_hub")
    except ImportError as e:
        raise TasksetError(
            f"taskset {config.name}: {config.path} needs the package datasets, which can't be imported ({e}): "
            "`pip install 'trinity-es[datasets]'`, or give the taskset as a file"
        ) from e
