"""The command line as a whole: help with examples, one-sentence errors, completion that completes, a man page."""

import os
import re
import shutil
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from agent.__main__ import COMMANDS, build_parser, main
from agent.errors import shortened
from agent.recording.frames import HEAD, PASSES, frame
from agent.shell import bash, man, zsh
from agent.shell.spec import describe

SCENARIOS = Path(__file__).parents[2] / "lab" / "scenarios"
RECORDING = Path(__file__).parents[1] / "packaging" / "fixtures" / "demo.rec"


def run(*arguments, **keywords):
    command = [sys.executable, "-m", "agent", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **keywords)


@pytest.fixture(scope="module")
def commands():
    return describe(build_parser(*COMMANDS))


def test_every_command_is_described(commands):
    assert [command.name for command in commands] == list(COMMANDS)
    for command in commands:
        assert command.summary == COMMANDS[command.name]
        assert command.description.endswith("."), command.name
        for option in command.options:
            assert option.meaning, (command.name, option.flags)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_names_the_command(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    examples = done.stdout.partition("example")[2]
    assert re.search(rf"prefetchd {name}\b", examples), done.stdout
    assert "exit status" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("fly",), ("doctor", "--colour"), ("top", "--sort", "luck")])
def test_wrong_usage_is_status_2(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: prefetchd" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin1"])
def test_signs_that_the_terminal_has_not_break_nothing(encoding):
    done = subprocess.run(
        [sys.executable, "-m", "agent", "completion", "man"],
        capture_output=True, check=False, timeout=60, env={"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"prefetchd" in done.stdout.decode(encoding).encode()


def test_a_page_on_standard_output_is_utf_8_as_it_says():
    done = subprocess.run(
        [sys.executable, "-m", "agent", "report", RECORDING, "--title", "Größe…", "-o", "-"],
        capture_output=True, check=False, timeout=60, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Größe…" in done.stdout.decode()


def test_too_little_memory_is_a_sentence(monkeypatch, capsys):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr("agent.commands.replay.compare", exhausted)
    assert main(["replay", "node7.rec"]) == 1
    assert re.fullmatch(r"prefetchd: There is not enough memory; .*ulimit -v.*\.\n", capsys.readouterr().err)


def test_an_empty_user_never_means_root():
    done = run("exec", "--job", "a", "--user", "", "--", "true")
    assert done.returncode == 2
    assert "--user is empty ($USER may not be set)" in done.stderr
    assert "Traceback" not in done.stderr


LONG = "x" * 3000


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("exec", f"--job={LONG}", "--", "true"), 125),
        (("exec", "--job", "a", "--", LONG), 127),
        (("replay", LONG), 1),
        (("top", "--config", LONG), 2),
        (("top", "--address", LONG), 2),
        (("simulate", "--scenario", LONG), 2),
        (("calibrate", LONG), 1),
        (("top", "--sort", LONG), 2),
        ((LONG,), 2),
    ],
)
def test_an_endless_value_is_quoted_in_short(arguments, status):
    done = run(*arguments)
    assert done.returncode == status
    last = done.stderr.splitlines()[-1]
    assert "xxx…" in last
    assert len(last) < 500, last


def test_what_is_quoted_is_cut_and_the_rest_is_left():
    message = f"Job {LONG!r} isn't 'known' here, path {'/a' * 100!r} is: it's the job's own."
    assert shortened(message) == message.replace(repr(LONG), repr(LONG)[:61] + "…" + repr(LONG)[-20:])
    assert shortened("short") == "short"


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "[::1", "::1", "http://", "https://:0", "http://x:99999", "127.0.0.1:0", "http://a b", "http://a?b",
     "ftp://x", "", ":", "127.0.0.1:1\r\nX: y"],
)  # fmt: skip
def test_an_address_that_is_none_is_a_sentence(address):
    done = run("top", "--once", "--address", address)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("prefetchd: Address ")
    assert "write for example 127.0.0.1:9753" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [("top", "--once"), ("explain", "resnet"), ("doctor",)])
@pytest.mark.parametrize("address", ["http://user:hunter2@127.0.0.1:1", "user:hun/ter2@127.0.0.1:1"])
def test_a_password_in_an_address_is_refused_and_never_shown(command, address):
    done = run(*command, "--address", address)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "***@127.0.0.1:1' may hold no user and password" in done.stderr
    assert "--auth FILE" in done.stderr
    assert "hun" not in done.stderr + done.stdout


def test_files_that_an_address_without_encryption_would_not_use_are_refused():
    done = run("top", "--once", "--address", "http://127.0.0.1:1", "--ca", "ca.pem", "--certificate", "me.pem")
    assert done.returncode == 2
    assert done.stderr == (
        "prefetchd: Address 'http://127.0.0.1:1' is not encrypted, so --ca and --certificate would do nothing; "
        "write https://.\n"
    )


def test_an_unknown_scenario_lists_those_that_are_known(tmp_path):
    done = run("simulate", "--scenario", "nosuch")
    assert done.returncode == 2
    known = re.search(r"'nosuch' is no file and none of those known by name \((.*)\)\.$", done.stderr.rstrip())[1]
    assert set(known.split(", ")) == {"paper", *(file.stem for file in SCENARIOS.glob("*.toml"))}
    folder = run("simulate", "--scenario", str(tmp_path))
    assert f"{str(tmp_path)!r} is a folder" in folder.stderr


def test_exec_tells_what_was_not_found_from_what_cannot_run(tmp_path):
    (tmp_path / "data").touch()
    calls = {str(tmp_path / "data"): (126, "is not executable; name a program."),
             "no-such-program": (127, "was not found; check its name and PATH.")}  # fmt: skip
    for command, (status, words) in calls.items():
        done = run("exec", "--job", "a", "--", command)
        assert (done.returncode, done.stderr) == (status, f"prefetchd: command {command!r} {words}\n")
    assert run("exec", "--job", "a", "--weight", "0", "--", "true").returncode == 2
    statuses = run("exec", "--help").stdout.partition("exit status")[2]
    assert all(re.search(rf"^  {status} ", statuses, re.MULTILINE) for status in (2, 125, 126, 127))


@pytest.mark.parametrize("address", ["http://a..b", "\u2603:80", "http://127.0.0.1:1/\u2603"])
def test_an_address_where_nobody_can_be_is_a_sentence(address):
    done = run("top", "--once", "--address", address)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "No agent answers at" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("report", "a", "-o"), ("doctor", "--bundle"), ("record",), ("simulate", "--json")]
)
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("", "names no file; give the path of the file to write."),
        ("/", "names no file; give the path of the file to write."),
        ("..", "names no file; give the path of the file to write."),
        ("folder/", "names no file; give the path of the file to write."),
        ("/dev/full", "is no regular file; choose another path."),
        ("/proc", "is no regular file; choose another path."),
        ("/nowhere/page", "is in a folder that does not exist; make it or choose another path."),
    ],
)
def test_a_target_that_is_no_file_is_refused_before_anything_is_done(arguments, target, words):
    done = run(*arguments, target)
    assert done.returncode == 2
    assert done.stderr == f"prefetchd: Path {target!r} {words}\n"


@pytest.mark.parametrize("length", ["nan", "inf", "-1", "0", "1e99", "", "2s"])
@pytest.mark.parametrize("scenario", ["paper", "skeleton"])
def test_a_length_that_is_none_is_refused_before_anything_is_done(scenario, length):
    done = run("simulate", "--scenario", scenario, "--policy", "none", f"--duration={length}")
    assert done.returncode == 2, done.stdout
    last = done.stderr.splitlines()[-1]
    assert "give" in last
    assert (length or "''") in last


def test_what_is_read_is_not_written_over(told_file, tmp_path):
    """A slip of one argument would cost the only recording of a night, or the scenario."""
    scenario = tmp_path / "small.toml"
    scenario.write_bytes((SCENARIOS / "skeleton.toml").read_bytes())
    linked = tmp_path / "linked"
    linked.symlink_to(told_file)
    calls = {
        ("report", str(told_file), "-o", str(told_file)): told_file,
        ("report", str(linked), "-o", str(told_file)): told_file,
        ("simulate", "--scenario", str(scenario), "--duration", "1", "--json", str(scenario)): scenario,
    }
    for call, kept in calls.items():
        before = kept.read_bytes()
        done = run(*call)
        assert done.returncode == 2, call
        assert "itself, which would be replaced; choose another path." in done.stderr
        assert kept.read_bytes() == before


@pytest.mark.parametrize("command", [("replay", "--check"), ("report", "-o", "-")])
def test_damage_is_told_beside_what_could_be_read(command, told_file):
    passes = frame(PASSES, zlib.compress(msgspec.msgpack.encode([[1.0, 1, [], [], [], [], [], None, None]])))
    told_file.write_bytes(told_file.read_bytes() + passes + b"\0" * 50)
    done = run(*command, str(told_file))
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "is damaged from byte" in done.stderr


@pytest.fixture
def told_file(tmp_path):
    """The shortest file that is a recording."""
    path = tmp_path / "node.rec"
    path.write_bytes(frame(HEAD, msgspec.msgpack.encode(SEGMENT)))
    return path


def test_top_level_help_lists_every_command():
    told = run("--help").stdout
    assert all(name in told for name in COMMANDS)
    assert "exit status" in told


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupter())
runpy.run_module("agent", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module", ["argparse", "agent.errors", "importlib.metadata", "agent.commands.simulate", "heapq"]
)
def test_an_interrupt_while_modules_load_ends_quietly(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "simulate", "--scenario", "paper", "--policy", "magic"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m agent completion bash | head -n 1"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("arguments", [("completion", "bash"), ("--help",), ("restore", "--json")])
def test_a_full_disk_behind_the_output_is_a_sentence(arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "agent", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            timeout=60, env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "prefetchd: Standard output cannot be written (No space left on device)."


def test_closed_streams_are_replaced_before_a_file_can_take_their_numbers():
    code = (
        "import os, sys; from agent.__main__ import main; status = main(['restore', '--state-directory', '/nowhere']);"
        "sys.exit(40 + status + sum(os.stat(n).st_rdev == os.stat(os.devnull).st_rdev for n in (0, 1, 2)))"
    )
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=False, timeout=60)
    assert done.returncode == 43


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    """Complete a line as bash does when Tab is pressed at its end."""
    file = tmp_path_factory.mktemp("completion") / "prefetchd.bash"
    file.write_text(run("completion", "bash").stdout)
    harness = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
        '_prefetchd; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def complete(*words, folder=None):
        done = subprocess.run(
            ["bash", "-euc", harness, str(file), "prefetchd", *words],
            capture_output=True, text=True, check=True, timeout=20, cwd=folder,
        )  # fmt: skip
        return done.stdout.split()

    return complete


def test_bash_completes_commands_options_and_values(completion):
    assert completion("") == [*COMMANDS, "--help", "--version"]
    assert completion("ca") == ["calibrate"]
    assert completion("doctor", "--mo") == ["--mode"]
    assert completion("doctor", "--mode", "") == ["observe", "dry-run", "enforce"]
    assert completion("top", "--sort", "s") == ["score"]
    assert completion("completion", "") == ["bash", "zsh", "man"]
    assert completion("top", "--interval", "") == []


def test_bash_completes_files_and_commands(completion, tmp_path):
    (tmp_path / "node.rec").touch()
    assert completion("replay", "no", folder=tmp_path) == ["node.rec"]
    assert completion("replay", "--config", "node.r", folder=tmp_path) == ["node.rec"]
    assert "bash" in completion("exec", "--job", "a", "--", "bas")
    assert completion("exec", "--job", "a", "--", "cat", "node", folder=tmp_path) == ["node.rec"]


@pytest.mark.parametrize("name", COMMANDS)
def test_bash_completes_every_option(completion, commands, name):
    (command,) = [one for one in commands if one.name == name]
    assert set(completion(name, "-")) == {flag for option in command.options for flag in option.flags}


def test_zsh_script_names_everything(commands, tmp_path):
    text = zsh.script(commands)
    assert text.startswith("#compdef prefetchd\n")
    for command in commands:
        assert f"        {command.name})\n" in text
        for option in command.options:
            assert all(f"){flag}[" in text for flag in option.flags)
    assert r"--listen[default\: " in text
    assert r"127.0.0.1\:9753]:ADDR\:PORT:" in text
    assert text.replace("""'"'"'""", "").count("'") % 2 == 0
    if shutil.which("zsh"):
        (tmp_path / "_prefetchd").write_text(text)
        subprocess.run(["zsh", "-n", str(tmp_path / "_prefetchd")], check=True, timeout=20)


def test_bash_script_is_well_formed(commands, tmp_path):
    (tmp_path / "x.bash").write_text(bash.script(commands))
    subprocess.run(["bash", "-n", str(tmp_path / "x.bash")], check=True, timeout=20)


def test_man_page_tells_every_option(commands):
    text = man.page(commands, "1.2", "What it is.").replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    for command in commands:
        assert f'.SS "prefetchd {command.name}"' in text
        for option in command.options:
            assert all(flag in text for flag in option.flags)


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_man_page_is_set_without_a_warning(commands):
    text = man.page(commands, "1.2", "What it is.")
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Kutf8", "-Tutf8", "-rLL=100n"],
        input=text, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert "prefetchd calibrate" in re.sub(r".\x08|\x1b\[[0-9;]*m", "", done.stdout)


SEGMENT = {"format": "prefetchd", "version": 1, "software": "", "started": 0.0, "policy": "adaptive", "mode": "observe",
           "config": {}}  # fmt: skip
NO_TIME = msgspec.msgpack.encode([[float("nan"), 1, [], [], [], [], [], None, None]])
BAD_FILES = {
    "missing": None,
    "empty": b"",
    "text": b"hello\n" * 50,
    "binary": bytes(range(256)) * 20,
    "not toml": b"[[jobs",
    "torn head": frame(HEAD, b"\x81\xa6format")[:9],
    "head of nothing": frame(HEAD, b"\x80"),
    "head of another version": frame(
        HEAD, msgspec.msgpack.encode({"format": "prefetchd", "version": 99, "software": ""})
    ),
    "passes without head": frame(PASSES, b"x"),
    "times that are none": frame(HEAD, msgspec.msgpack.encode(SEGMENT)) + frame(PASSES, zlib.compress(NO_TIME)),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_sentence_for_every_command_that_reads_one(content, tmp_path):
    """Wrong, torn, empty, absent: status 1 or 2, one line that names the file, no traceback, nothing written."""
    bad, page = tmp_path / "ünusual name", tmp_path / "page.html"
    if content is not None:
        bad.write_bytes(content)
    calls = [
        ("replay", str(bad)),
        ("report", str(bad), "-o", str(page)),
        *(() if content == b"" else (("top", "--once", "--config", str(bad)), ("doctor", "--config", str(bad)))),
        ("simulate", "--scenario", str(bad)),
    ]
    with ThreadPoolExecutor(2) as pool:
        for call, done in zip(calls, pool.map(lambda call: run(*call), calls), strict=True):
            assert done.returncode in (1, 2), (call, done.stderr)
            assert len(done.stderr.splitlines()) == 1, (call, done.stderr)
            assert "ünusual name" in done.stderr, call
    assert not page.exists()


@pytest.mark.parametrize(
    "command", [("replay",), ("report",), ("top", "--once", "--config"), ("simulate", "--scenario")]
)
def test_a_folder_in_place_of_a_file_is_a_sentence(command, tmp_path):
    done = run(*command, str(tmp_path))
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(tmp_path) in done.stderr


def test_no_target_is_not_the_working_folder(capsys):
    assert main(["calibrate", "", "--size", "1 KiB"]) == 2
    assert "Target '' names nothing" in capsys.readouterr().err
