from __future__ import annotations

import pytest

from alpagym_runtime.secrets import redacted, secret_in

VALUE = "5ecretmarker-0123456789"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "REGISTRY_PASSWORD", "my_token"]
)
def test_the_value_of_a_secret_variable_is_found_and_hidden(name, monkeypatch):
    monkeypatch.setenv(name, VALUE)
    assert secret_in(f"x {VALUE} y") == f"the value of the environment variable {name}"
    assert redacted(f"x {VALUE} y {VALUE}") == "x *** y ***"


def test_other_variables_and_short_values_are_not_secrets(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-long-value-of-no-secret")
    monkeypatch.setenv("HF_TOKEN", "short")
    assert secret_in("a-long-value-of-no-secret short") is None


def test_of_two_secrets_one_of_which_holds_the_other_nothing_is_left(monkeypatch):
    monkeypatch.setenv("A_TOKEN", VALUE)
    monkeypatch.setenv("B_TOKEN", VALUE + "more")
    assert redacted(f"{VALUE}more") == "***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:pw@proxy:3128", "http://me:***@proxy:3128"),
        ("https://:pw@h/x", "https://:***@h/x"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("git@github.com:a/b", "git@github.com:a/b"),
    ],
)
def test_the_password_of_a_url_is_hidden(url, shown):
    assert redacted(f"via {url}.") == f"via {shown}."
    assert (secret_in(url) is not None) == (url != shown)
