"""`python -m flash_kda`, run as a user runs it."""

import json
import subprocess
import sys

import pytest
import torch

import flash_kda
from flash_kda import cli

PARAGRAPHS = "\n\n".join(("Ein Absatz über Größe. " * n).strip() for n in (3, 1, 40, 7)) + "\n\n \n\n✓\n"


def run(*arguments, stdin=b""):
    command = [sys.executable, "-m", "flash_kda", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def assert_refused(result, *words):
    """Exit status 2, nothing on standard output, one line on standard error that holds the words."""
    status, out, err = result
    assert status == 2 and not out
    assert err.startswith("flash_kda: error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_shipped_text(tmp_path):
    path = tmp_path / "report.json"
    status, out, err = run("--device", "cpu", "--heads", 2, "--json", path)
    assert status == 0, err
    report = json.loads(path.read_text())
    text = (cli.resources.files("flash_kda") / "data" / "sample.txt").read_text(encoding="utf-8")
    assert report["tokens"] == sum(len(p.strip().encode()) for p in text.split("\n\n"))
    assert (report["device"], report["heads"], report["version"]) == ("CPU", 2, flash_kda.__version__)
    assert report["seconds"] > 0 and report["pieces"] > 1
    assert [check["ok"] for check in report["checks"]] == [True] * 4
    assert all(0 < check["error"] <= check["bound"] for check in report["checks"])
    for word in ("CPU", "tokens/s", "fp64 recurrence", "streamed against one call", str(report["tokens"])):
        assert word in " ".join(out.split())


def test_file_and_standard_input_agree(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PARAGRAPHS, encoding="utf-8")
    reports = []
    for source, stdin in ((text, b""), ("-", PARAGRAPHS.encode())):
        path = tmp_path / "report.json"
        status, _, err = run("--text", source, "--device", "cpu", "--heads", 1, "--json", path, stdin=stdin)
        assert status == 0, err
        reports.append(json.loads(path.read_text()))
    assert reports[0]["checks"] == reports[1]["checks"]
    assert reports[0]["sequences"] == 5 and reports[0]["longest_sequence"] == 40 * 26 - 1


def test_version():
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"flash_kda {flash_kda.__version__} (") and out.count("\n") == 1
    assert "CPU only" in out or "archs" in out


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "holds no text"), (b"\n \n\n\t\n", "holds no text"), (b"ab\xffcd", "byte 2")]
)
def test_unusable_text(tmp_path, content, words):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    assert_refused(run("--text", text, "--device", "cpu"), str(text), words)
    assert_refused(run("--text", "-", "--device", "cpu", stdin=content), "standard input", words)


def test_missing_text(tmp_path):
    assert_refused(run("--text", tmp_path / "none.txt"), "none.txt", "No such file")
    assert_refused(run("--text", tmp_path), "Is a directory")


def test_closed_standard_input():
    command = [sys.executable, "-m", "flash_kda", "--text", "-", "--device", "cpu"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True)
    assert_refused((done.returncode, done.stdout, done.stderr), "standard input", "closed")


@pytest.mark.parametrize("arguments", [("--version",), ("--device", "cpu", "--heads", "1", "--text")])
def test_full_standard_output(text, arguments):
    arguments = [*arguments, str(text)] if arguments[-1] == "--text" else arguments
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "flash_kda", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "flash_kda: error: standard output: cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "", "cuda:4096"])
def test_unknown_device(name):
    assert_refused(run("--device", name), "--device", name)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--heads", "0"), ("--heads", "-1"), ("--heads", "two"), ("--heads", 2**24), ("--heads", 10**20)),
        *(("--seed", "x"), ("--seed", 2**63), ("--nonsense",)),
    ],
)
def test_unusable_options(arguments):
    assert_refused(run(*arguments), arguments[0])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("A paragraph of some length. " * 5 + "\n\n" + "Another one. " * 12, encoding="utf-8")
    return path


@pytest.fixture
def main(text, monkeypatch):
    """The command line on a short text, one head, and pieces that cut it."""
    monkeypatch.setattr(cli, "PIECE_TOKENS", 100)
    return lambda *arguments: cli.main(["--device", "cpu", "--heads", "1", "--text", str(text), *map(str, arguments)])


def failing(error):
    def fwd(**arguments):
        raise error

    return fwd


def test_unknown_schedule(main, monkeypatch, capsys):
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", "fastest")
    assert_refused((main(), *capsys.readouterr()), "FLASH_KDA_SCHEDULE", "'fastest'")


def test_json_is_refused_before_the_computation(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "prefill", failing(AssertionError("computed all the same")))
    for path in (tmp_path / "none" / "report.json", tmp_path, tmp_path / ("name" * 100)):
        assert_refused((main("--json", path), *capsys.readouterr()), str(path), "cannot be written")
    assert not any(tmp_path.iterdir())


def test_json_does_not_replace_the_text(main, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "prefill", failing(AssertionError("computed all the same")))
    before, link = text.read_text(), tmp_path / "link"
    link.symlink_to(text)
    for path in (text, link):
        assert_refused((main("--json", path), *capsys.readouterr()), str(path), "is the text")
    assert text.read_text() == before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore."), "out of memory. Tried"),
        (RuntimeError("flash_kda: the kernel launch failed: cudaErrorIllegalAddress"), "kernel launch failed"),
        (MemoryError(), "MemoryError"),
    ],
    ids=["GPU memory", "launch", "memory"],
)
@pytest.mark.parametrize("before", [None, "an older report"])
def test_a_failed_computation(main, tmp_path, monkeypatch, capsys, error, words, before):
    """One line, exit status 1, and --json's file is as it was."""
    path = tmp_path / "report.json"
    if before:
        path.write_text(before)
    monkeypatch.setattr(cli, "fwd", failing(error))
    assert main("--json", path) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("flash_kda: error: the computation failed: ") and err.count("\n") == 1
    assert words in err
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == ([(path, before)] if before else [])


def test_json_replaces_a_link_s_target(main, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("an older report")
    link.symlink_to(target)
    assert main("--json", link) == 0
    assert link.is_symlink() and json.loads(target.read_text())["heads"] == 1
    assert set(tmp_path.iterdir()) == {target, link}


def test_seed(main, tmp_path):
    """The same seed gives the same numbers, another seed other ones."""
    path = tmp_path / "report.json"
    errors = []
    for seed in (3, 3, 4):
        assert main("--seed", seed, "--json", path) == 0
        report = json.loads(path.read_text())
        assert report["seed"] == seed
        errors.append([check["error"] for check in report["checks"]])
    assert errors[0] == errors[1]
    assert all(a != b for a, b in zip(errors[0], errors[2], strict=True))


@pytest.mark.parametrize("part", ["out", "final_state"])
def test_exit_status_one_beyond_a_bound(main, monkeypatch, capsys, part):
    """A kernel that is one per cent off is caught by the comparison with the recurrence."""

    def slightly_wrong(**arguments):
        flash_kda.fwd(**arguments)
        arguments[part].mul_(1.01)

    monkeypatch.setattr(cli, "fwd", slightly_wrong)
    assert main() == 1
    assert "EXCEEDED" in capsys.readouterr().out


def test_streaming_that_forgets_the_state_is_caught(monkeypatch):
    def forgetful(**arguments):
        flash_kda.fwd(**arguments | {"initial_state": None})

    monkeypatch.setattr(cli, "fwd", forgetful)
    report = cli.prefill([b"abcdefghij" * 150], 1, torch.device("cpu"), 0)
    assert [check["ok"] for check in report["checks"]] == [True, True, False, False]


def test_one_paragraph_longer_than_the_recurrence_can_afford(monkeypatch):
    monkeypatch.setattr(cli, "SAMPLE_LIMIT", 500)
    monkeypatch.setattr(cli, "SAMPLE_TOKENS", 100)
    report = cli.prefill([b"word " * 300, b"text " * 200], 2, torch.device("cpu"), 0)
    assert report["sample_tokens"] == 100 and all(check["ok"] for check in report["checks"])


def test_convolution_stays_inside_its_paragraph():
    """The layer's inputs of a paragraph do not depend on the paragraphs around it."""
    paragraphs = [b"first one", b"x", b"the last of them"]
    packed = cli.layer_inputs(paragraphs, 2, torch.device("cpu"), 0)
    start = 0
    for paragraph in paragraphs:
        alone = cli.layer_inputs([paragraph], 2, torch.device("cpu"), 0)
        for name in ("q", "k", "v", "g", "beta"):
            rows = packed[name][:, start : start + len(paragraph)]
            torch.testing.assert_close(rows, alone[name], rtol=2e-2, atol=1e-3)
        start += len(paragraph)
