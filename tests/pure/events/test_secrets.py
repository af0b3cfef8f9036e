"""Which values are secrets, and where those of tasks are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from trinity_es.events.errors import DataError
from trinity_es.events.secrets import MASK, Secret, SecretFile, is_secret_key, marked, mask, masked_keys, unmarked


@pytest.mark.parametrize("key", [
    "api_key", "apiKey", "OPENAI_API_KEY", "X-Api-Key", "hf_token", "HF_TOKEN", "token", "access_token",
    "authorization", "Authorization", "password", "db_password", "secret", "client_secret", "private_key",
    "AWS_SECRET_ACCESS_KEY",
    "GITHUB_PAT", "set-cookie", "WANDB_API_KEY", "session_token", "webhook_url", "OPENAI_KEY", "MY_SERVICE_KEYS",
    "api_keys", "api_tokens", "passwords",
])
def test_a_text_under_such_a_key_is_a_secret(key: str) -> None:
    assert is_secret_key(key)
    assert mask({"args": [{key: "s3cr3t"}]}) == {"args": [{key: MASK}]}
    assert mask({key: ["s3cr3t"]}) == {key: [MASK]}


@pytest.mark.parametrize("key", [
    "max_tokens", "tokenizer", "tokenizer_path", "token_ids", "pad_token", "eos_token", "bos_token", "stop_token",
    "max_token", "prompt_key", "response_key", "key", "keys", "tokens", "secretary", "author", "max_response_tokens",
    "priority_fn", "path", "pattern", "passes", "image_token", "token_level", "authors",
])
def test_a_text_under_such_a_key_is_none(key: str) -> None:
    assert not is_secret_key(key)
    assert mask({key: "some text"}) == {key: "some text"}


def test_numbers_flags_nothing_references_and_special_tokens_are_no_secrets() -> None:
    given = {"token": 7, "secret": True, "password": None, "auth": "", "my_token": "<|im_end|>", "auth_key": "${KEY}"}
    assert mask(given) == given


def test_what_looks_like_a_secret_is_one_under_any_key_and_urls_keep_all_but_their_password() -> None:
    assert mask(["Bearer abcdefghij", "sk-abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"]) == [MASK] * 3
    assert mask({"url": "postgresql://me:s3cr3t@host/db"}) == {"url": "postgresql://me:***@host/db"}
    assert mask({"url": "http://host:80/a@b", "text": "see a://b:c@d for more"}) == {
        "url": "http://host:80/a@b", "text": "see a://b:c@d for more",
    }


def test_secrets_in_a_mapping_under_their_key_and_within_a_longer_text_are_masked() -> None:
    given = {"api_keys": {"openai": "s3cr3t", "more": ["s3cr3t"]}}
    assert mask(given) == {"api_keys": {"openai": MASK, "more": [MASK]}}
    command = "curl -H 'Authorization: Bearer s3cr3t-s3cr3t' http://host"
    assert mask({"cmd": command}) == {"cmd": f"curl -H 'Authorization: Bearer {MASK}' http://host"}
    prose = {"prompt": "Who is the bearer certificate for, and what is basic authorization: a token?"}
    assert mask(prose) == prose


def test_what_a_workflow_quotes_of_its_secrets_is_masked(tmp_path: Path) -> None:
    hidden = SecretFile(tmp_path).hide({"api_key": "s3cr3t-value", "pwd": "ab"})
    runner = SecretFile(tmp_path)
    runner.reveal(hidden)
    assert runner.scrubbed("401: s3cr3t-value was refused, about") == f"401: {MASK} was refused, about"


def test_a_secret_by_type_stays_one_in_json_and_is_shown_nowhere() -> None:
    told = marked(unmarked({"a": [SecretStr("s3cr3t")], "b": "plain"}))
    assert told == {"a": [{"$secret": "s3cr3t"}], "b": "plain"}
    assert unmarked(told) == {"a": ["s3cr3t"], "b": "plain"}
    assert isinstance(unmarked(told)["a"][0], Secret)
    assert mask(told) == {"a": [MASK], "b": "plain"}
    assert masked_keys(mask(told)) == ["a[0]"]


def test_the_secrets_of_tasks_have_names_and_come_back_in_another_process(tmp_path: Path) -> None:
    given = {"workflow_args": {"judge": {"api_key": "s3cr3t"}, "again": {"password": "s3cr3t"}, "n": 2}}
    hidden = SecretFile(tmp_path).hide(given)
    assert "s3cr3t" not in str(hidden)
    assert hidden == SecretFile(tmp_path).hide(given) == SecretFile(tmp_path).hide(hidden)
    assert SecretFile(tmp_path).reveal(hidden) == given
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    with (tmp_path / "secrets").open("ab") as file:
        file.write(b'["cut')  # by a crash
    other = SecretFile(tmp_path).hide({"token": "another"})
    assert SecretFile(tmp_path).reveal([hidden, other]) == [given, {"token": "another"}]


def test_a_secret_that_is_not_kept_here_is_told_with_the_way_out(tmp_path: Path) -> None:
    hidden = SecretFile(tmp_path / "here").hide({"token": "s3cr3t"})
    with pytest.raises(DataError, match="put that file back, or submit the batch again"):
        SecretFile(tmp_path / "there").reveal(hidden)
