"""The command: pages, expressions, diagnoses, and what is wrong in one line."""

import json
import os
from pathlib import Path

import pytest
from expressions import FOUND, REFUSED, samples_to_find
from made_runs import run_of, sample, write_rlcore_run
from rlcore_view import ViewError, query, read
from rlcore_view.cli import main
from rlcore_view.redaction import _secrets, redact


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_rlcore_run(tmp_path / "sums")


def test_a_path_alone_writes_a_page(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run)]) == 0
    assert (tmp_path / "sums.html").is_file()
    assert capsys.readouterr().out == "rlcore: 8 samples of 2 steps in sums.html\n"


def test_an_evaluation_before_the_first_step_is_not_a_step() -> None:
    evaluated = [sample(0, 0, 0, 0.0, lane="eval"), sample(2, 0, 0, 0.0, lane="eval")]
    assert run_of([*evaluated, sample(1, 0, 0, 0.0), sample(2, 0, 0, 0.0)]).num_steps == 2
    assert run_of(evaluated).num_steps == 2


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("reward < 0.5", 4),
        ("reward >= 1 and truncated", 4),
        ("not truncated", 4),
        ("step == 2 and prompt == 'sums/1'", 2),
        ("'é' in text", 8),
        ("reward.right == 1 and reward.short == 1", 4),
        ("-1 < advantage < 0", 4),
        ("reward.unknown < 1", 0),
        ("lane == 'eval' or failed", 0),
    ],
)
def test_samples_are_found_by_an_expression(run: Path, expression: str, found: int, capsys) -> None:
    assert main(["find", str(run), expression, "--json"]) == (0 if found else 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == found
    for line in lines:
        assert json.loads(line).keys() >= {"reward", "text", "response", "step", "prompt", "components"}


@pytest.mark.parametrize("expression", FOUND)
def test_an_expression_finds_what_the_page_finds(expression: str) -> None:
    test = query.parse(expression)
    found = [index for index, entry in enumerate(samples_to_find().samples) if test(entry)]
    assert found == sorted(FOUND[expression])


@pytest.mark.parametrize(("expression", "problem"), REFUSED.items())
def test_an_expression_is_data_and_what_it_does_not_know_is_named(
    run: Path, expression: str, problem: str, capsys
) -> None:
    assert main(["find", str(run), expression]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_a_value_that_a_sample_lacks_compares_as_false() -> None:
    assert not query.parse("reward < 1")(sample(1, 0, 0, None))
    assert not query.parse("not reward >= 1 and reward < 1")(sample(1, 0, 0, None))


def test_a_diagnosis_is_printed_as_text_and_as_json(run: Path, capsys) -> None:
    assert main(["diagnose", str(run)]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    for file in (run / "trajectories").iterdir():
        file.write_text(file.read_text().replace('"stop"', '"length"'))
    assert main(["diagnose", str(run), "--json"]) == 0
    [finding] = json.loads(capsys.readouterr().out)
    assert finding["name"] == "responses are cut off"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path / "nowhere", "there is no such file or directory"),
        (lambda path: path, "this is not a run that rlcore-view knows"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_2(tmp_path: Path, make, problem: str, capsys) -> None:
    assert main([str(make(tmp_path)), "--out", str(tmp_path / "x.html")]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["page", "--max-mb", "nan"], "--max-mb: found nan; needs a number of megabytes, 0 or more"),
        (["page", "--max-mb", "inf"], "--max-mb: found inf; needs a number of megabytes, 0 or more"),
        (["page", "--max-mb=-1"], "--max-mb: found -1; needs a number of megabytes, 0 or more"),
        (["find", "step == 1", "--limit=-1"], "--limit: found -1; needs 0 or more"),
    ],
)
def test_a_number_that_an_option_cannot_be_is_one_line(
    run: Path, arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *more = arguments
    assert main([command, str(run), *more]) == 2
    assert capsys.readouterr().err == f"rlcore-view: {problem}\n"


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "trajectories").mkdir()
    assert main([str(tmp_path)]) == 2
    assert "there are no samples yet" in capsys.readouterr().err


def test_a_run_in_its_first_step_is_known_and_has_no_samples_yet(tmp_path: Path, capsys) -> None:
    for name in ("plan.json", "status.json", "config.yaml"):
        (tmp_path / name).write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "there are no samples yet; take a step first" in capsys.readouterr().err
    assert read(tmp_path).format == "rlcore"


def test_a_page_that_cannot_be_written_says_so(run: Path, capsys) -> None:
    assert main([str(run), "--out", str(run / "no" / "x.html")]) == 2
    assert "it cannot be written: No such file or directory; choose another with --out" in capsys.readouterr().err


def test_a_device_a_pipe_or_a_directory_is_not_replaced_by_a_page(run: Path, tmp_path: Path, capsys) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # stands in for a device, which only root can replace
    for out in (pipe, tmp_path):
        assert main([str(run), "--out", str(out)]) == 2
        assert f"'{out}': it is not a regular file; choose another with --out" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_run_that_is_given_twice_has_two_names(run: Path, capsys) -> None:
    assert main(["diff", str(run), str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["a: sums (1)", "b: sums (2)"]


def test_a_terminal_sees_no_control_characters(run: Path, capsys) -> None:
    file = run / "trajectories" / "step_000001.jsonl"
    file.write_text(file.read_text().replace("!0", "\\u001b[31mred\\u202e"))
    assert main(["find", str(run), "'red' in text"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[31mred\\u202e" in out
    assert "\x1b" not in out


def test_secrets_are_taken_out(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret-s3cret")
    _secrets.cache_clear()
    file = run / "trajectories" / "step_000001.jsonl"
    file.write_text(file.read_text().replace("!0", "s3cret-s3cret hf_abcdefghijklmnopqrst"))
    assert main(["find", str(run), "'s3cret' in text", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["response"] == "4é${MY_API_KEY} [hf_a... redacted]"
    monkeypatch.delenv("MY_API_KEY")
    _secrets.cache_clear()


def test_arguments_that_are_refused_are_shown_without_secrets_and_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret-s3cret")
    _secrets.cache_clear()
    with pytest.raises(SystemExit) as ended:
        main(["find", "run", "reward < 1", "--unknown=s3cret-s3cret\x1b[31m"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--unknown=${MY_API_KEY}\\x1b[31m")
    monkeypatch.delenv("MY_API_KEY")
    _secrets.cache_clear()


def test_a_name_that_is_cut_holds_no_half_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret-s3cret")
    _secrets.cache_clear()
    runs = [write_rlcore_run(tmp_path / name) for name in "ab"]
    for file in tmp_path.glob("*/trajectories/*.jsonl"):
        file.write_text(file.read_text().replace("sums/0", "x" * 73 + "s3cret-s3cret"))
    assert main(["find", str(runs[0]), "reward == 1"]) == 0
    assert main(["diff", *map(str, runs)]) == 0
    assert "s3cret" not in capsys.readouterr().out
    monkeypatch.delenv("MY_API_KEY")
    _secrets.cache_clear()


def test_the_command_says_which_metrics_its_page_leaves_out(run: Path, tmp_path: Path, capsys) -> None:
    record = {"step": 1, **{f"loss/{number}": 0.5 for number in range(2001)}}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["page", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "1 of 2001 metrics are left out, from 'loss/2000' on; a page shows 2000\n" in capsys.readouterr().out


def test_words_that_only_resemble_tokens_stay() -> None:
    assert redact("sk-learn and hf_model, ghp_short") == "sk-learn and hf_model, ghp_short"


def test_an_expression_that_does_not_parse_is_a_view_error() -> None:
    with pytest.raises(ViewError):
        query.parse("")
