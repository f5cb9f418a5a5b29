import pickle

import pytest

from alpagym_plugins import ConfigError, check_choice, check_range, nearest


def test_error_names_the_key_before_the_message():
    assert str(ConfigError("must be positive", key="slots")) == "slots: must be positive"


def test_error_without_a_key_is_the_message():
    assert str(ConfigError("must be positive")) == "must be positive"


def test_under_puts_the_prefix_before_the_key():
    err = ConfigError("must be positive", key="scale").under("progress").under("reward.terms")
    assert err.key == "reward.terms.progress.scale"
    assert str(err) == "reward.terms.progress.scale: must be positive"


def test_under_gives_the_prefix_to_an_error_without_a_key():
    assert ConfigError("is empty").under("reward").key == "reward"


def test_under_leaves_the_first_error_as_it_was():
    err = ConfigError("is empty", key="terms")
    err.under("reward")
    assert err.key == "terms"


def test_error_survives_the_way_from_a_worker_process():
    err = pickle.loads(pickle.dumps(ConfigError("must be positive", key="slots")))
    assert (str(err), err.key) == ("slots: must be positive", "slots")


@pytest.mark.parametrize("value", [1, 1.0, 8, 10**400])
def test_a_minimum_may_be_reached(value):
    check_range("slots", value, minimum=1)


def test_a_bound_below_may_not_be_reached():
    check_range("top_p", 0.5, above=0, below=1)
    with pytest.raises(ConfigError, match=r"^top_p: must be a finite number above 0 and below 1, got 1$"):
        check_range("top_p", 1, above=0, below=1)


def test_a_number_out_of_range_names_key_value_and_range():
    with pytest.raises(ConfigError) as caught:
        check_range("slots", 0, minimum=1, maximum=4096)
    assert str(caught.value) == "slots: must be a finite number at least 1 and at most 4096, got 0"
    assert caught.value.key == "slots"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused_without_any_bound(value):
    with pytest.raises(ConfigError, match="rate: must be a finite number, got"):
        check_range("rate", value)


@pytest.mark.parametrize("value", [True, None, "3"])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match="slots: must be a finite number at least 1, got"):
        check_range("slots", value, minimum=1)


def test_a_choice_is_accepted():
    check_choice("mode", "mean", ("sample", "mean"))


def test_a_wrong_choice_names_all_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        check_choice("mode", "Sampl", ("sample", "mean"))
    assert str(caught.value) == "mode: must be one of 'sample', 'mean', got 'Sampl'; did you mean 'sample'?"


def test_a_choice_that_resembles_none_gets_no_guess():
    with pytest.raises(ConfigError, match=r"got 'xyz'$"):
        check_choice("mode", "xyz", ("sample", "mean"))


def test_nearest_ignores_case():
    assert nearest("GRPO", ["sft", "grpo"]) == "grpo"
