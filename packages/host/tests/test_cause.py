from alpagym_host.cause import ending, last_words


def written(tmp_path, text):
    log = tmp_path / "alpasim.log"
    log.write_text(text)
    return log


def test_the_cause_is_shown_before_what_followed_from_it(tmp_path):
    noise = [f"physics-0   | INFO step {i}" for i in range(5000)]
    lines = [
        *noise[:2000],
        "\x1b[36mrenderer-0  |\x1b[0m torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        *noise[2000:],
        "Traceback (most recent call last):",
        '  File "wizard.py", line 9, in <module>',
        "subprocess.CalledProcessError: Command 'docker compose up' returned non-zero exit status 1.",
    ]
    shown = last_words(written(tmp_path, "\n".join(lines))).splitlines()
    assert len(shown) <= 12
    assert shown[0] == "renderer-0  | torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert shown[-1].startswith("subprocess.CalledProcessError")


def test_a_line_that_repeats_is_shown_once_as_a_cause(tmp_path):
    lines = ["error: the port is taken"] * 50 + ["INFO a", "INFO b", "INFO c", "INFO d", "INFO e", "INFO f"]
    shown = last_words(written(tmp_path, "\n".join(lines))).splitlines()
    assert shown.count("error: the port is taken") == 1


def test_long_lines_are_cut_and_secrets_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    shown = last_words(written(tmp_path, "denied: hf_0123456789abcdef " + "x" * 1000))
    assert "hf_0123456789abcdef" not in shown
    assert len(shown) <= 300


def test_a_log_that_is_empty_or_absent_is_said(tmp_path):
    assert last_words(written(tmp_path, "\n\n")) == "it said nothing"
    assert last_words(tmp_path / "no").startswith("its log cannot be read")


def test_endings_are_words():
    assert [ending(0), ending(3), ending(-9)] == ["ended with code 0", "ended with code 3", "was ended by SIGKILL"]
