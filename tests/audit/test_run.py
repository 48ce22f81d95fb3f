# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale audit run``: programs of their own, on the host backend."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from metrale.audit.capture import Capture
from metrale.audit.tables import leaks

CLEAN = """
    import metrale
    with metrale.open("host") as gpu:
        gpu.buffer(4096, tag="x").free()
"""
LEAKY = """
    import metrale, other
    gpu = metrale.open("host")
    gpu.alloc(4096, "weights")
    other.keep(gpu)
    gpu.buffer(64, tag="fine").free()
"""
OTHER = """
    def keep(gpu):
        gpu.alloc(2048, "kv")
        gpu.alloc(100)
"""


@pytest.fixture
def audit(tmp_path):
    """`audit(*arguments, **programs)`: the run, in a folder with the programs; `audit.captures()`: those there."""

    def run(*arguments, **programs):
        for name, code in programs.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(code).lstrip())
        command = [sys.executable, "-P", "-m", "metrale", "audit", "run", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    run.folder = tmp_path
    run.captures = lambda: sorted(tmp_path.glob("*.json"), key=lambda path: (path.name.count("."), path.name))
    return run


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request):
    """`on(code)`: the program on each kind of backend in turn."""
    return lambda code: code.replace('"host"', f'"{request.param}"')


def leak_rows(stderr):
    """Bytes, kind, tag, site of each listed leak."""
    return [line.split() for line in re.findall(r"^ *[\d,]+ +\d+ +\w+ .*$", stderr, re.MULTILINE)]


def test_buffers_leaked_in_two_files_are_named_line_by_line(audit, on):
    done = audit("main.py", main=on(LEAKY), other=OTHER)
    assert done.returncode == 0
    assert "metrale audit: leaked 3 allocations, 6,244 bytes\n" in done.stderr
    assert [(row[0], row[2], row[3], row[4]) for row in leak_rows(done.stderr)] == [
        ("4,096", "device", "weights", f"{audit.folder}/main.py:3"),
        ("2,048", "device", "kv", f"{audit.folder}/other.py:2"),
        ("100", "device", "-", f"{audit.folder}/other.py:3"),
    ]


def test_streams_events_and_graphs_that_leak_are_named(audit):
    code = """
        import metrale
        gpu = metrale.open("host")
        gpu.create_stream()
        gpu.create_event()
    """
    done = audit("main.py", main=code)
    assert "leaked 1 event, 1 stream" in done.stderr
    assert [(row[2], row[4]) for row in leak_rows(done.stderr)] == [
        ("stream", f"{audit.folder}/main.py:3"),
        ("event", f"{audit.folder}/main.py:4"),
    ]


def test_what_close_gives_back_has_leaked_too(audit):
    code = """
        import metrale
        gpu = metrale.open("host")
        gpu.alloc(512, "left")
        gpu.close()
    """
    assert "leaked 1 allocation, 512 bytes" in audit("main.py", main=code).stderr


def test_a_clean_program_says_so(audit, on):
    done = audit("--fail-on-leak", "main.py", main=on(CLEAN))
    assert done.returncode == 0
    assert "metrale audit: nothing leaked\n" in done.stderr


def test_what_an_exit_function_of_the_program_frees_has_not_leaked(audit):
    code = """
        import atexit, metrale
        gpu = metrale.open("host")
        x = gpu.buffer(64)
        atexit.register(x.free)
    """
    assert "nothing leaked" in audit("main.py", main=code).stderr


def test_fail_on_leak_exits_1(audit, on):
    assert audit("--fail-on-leak", "main.py", main=on(LEAKY), other=OTHER).returncode == 1


def test_a_status_is_kept_where_nobody_reads_the_summary(audit):
    audit("main.py", main=LEAKY, other=OTHER)
    run = f"{sys.executable} -P -m metrale audit run --fail-on-leak main.py"
    command = f"{run} 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], cwd=audit.folder).returncode == 1


def test_the_summary_goes_to_stderr_and_stdout_is_the_programs(audit):
    done = audit("main.py", main=CLEAN + '    print("result")\n')
    assert done.stdout == "result\n"


def test_a_program_that_opens_no_backend_is_told_so_and_leaves_nothing(audit):
    done = audit("main.py", main="print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "opened no backend; nothing was recorded" in done.stderr
    assert audit.captures() == []


def test_a_program_that_raises_keeps_its_status_and_has_a_capture(audit):
    done = audit("--fail-on-leak", "-o", "c.json", "main.py", main=LEAKY + '    raise OSError("no")\n', other=OTHER)
    assert done.returncode == 1
    assert "OSError: no" in done.stderr
    assert len(leaks(Capture.read(audit.folder / "c.json").backends[0])) == 3


def test_the_programs_own_status_goes_before_that_of_a_leak(audit):
    done = audit("--fail-on-leak", "main.py", main=LEAKY + "    import sys\n    sys.exit(3)\n", other=OTHER)
    assert done.returncode == 3
    assert len(audit.captures()) == 1


def test_a_program_that_a_signal_ends_has_the_status_of_a_shell_and_no_capture(audit):
    code = LEAKY + "    import os\n    os.kill(os.getpid(), 9)\n"
    done = audit("main.py", main=code, other=OTHER)
    assert done.returncode == 128 + 9
    assert "not written: the process was killed, or runs still" in done.stderr
    assert audit.captures() == []


@pytest.mark.parametrize("arguments", [["missing.py"], ["-o", "no/such/c.json", "main.py"]])
def test_a_file_or_folder_that_is_missing_is_a_line_and_exit_2(audit, arguments):
    done = audit(*arguments, main=CLEAN)
    assert done.returncode == 2
    assert re.fullmatch(r"metrale audit: no such (file|folder): .*\n", done.stderr)


def test_arguments_after_the_script_are_the_scripts(audit):
    done = audit("main.py", "-o", "x", "--fail-on-leak", main="import sys\nprint(sys.argv)")
    assert done.stdout == "['main.py', '-o', 'x', '--fail-on-leak']\n"


def test_a_module_runs_as_python_runs_it(audit):
    code = CLEAN + "    import sys\n    print(__name__, sys.argv[1:])\n"
    done = audit("-m", "main", "--flag", main=code)
    assert done.stdout == "__main__ ['--flag']\n"
    assert "nothing leaked" in done.stderr


def test_an_earlier_capture_is_replaced(audit):
    audit("-o", "c.json", "main.py", main=LEAKY, other=OTHER)
    done = audit("-o", "c.json", "main.py", main=CLEAN)
    assert "nothing leaked" in done.stderr
    assert [path.name for path in audit.captures()] == ["c.json"]


def test_a_file_that_is_no_capture_is_not_replaced(audit):
    done = audit("-o", "main.py", "main.py", main=CLEAN)
    assert done.returncode == 2
    assert (audit.folder / "main.py").read_text() == textwrap.dedent(CLEAN).lstrip()


def test_every_freed_record_is_there(audit):
    code = """
        import metrale
        with metrale.open("host") as gpu:
            for _ in range(3000):
                gpu.buffer(8).free()
    """
    audit("-o", "c.json", "main.py", main=code)
    backend = Capture.read(audit.folder / "c.json").backends[0]
    assert (len(backend.memory), backend.forgotten) == (3000, 0)


def test_backends_that_are_closed_and_opened_again_are_recorded_each(audit):
    code = """
        import metrale
        for nbytes in (64, 128):
            with metrale.open("host") as gpu:
                gpu.alloc(nbytes)
    """
    done = audit("-o", "c.json", "main.py", main=code)
    assert [b.peak_bytes for b in Capture.read(audit.folder / "c.json").backends] == [64, 128]
    assert done.stderr.count("metrale audit: leaked 1 allocation") == 2


def test_the_capture_knows_its_process(audit):
    audit("-o", "c.json", "main.py", "--steps", "3", main=CLEAN)
    process = Capture.read(audit.folder / "c.json").process
    assert process.argv[1:] == ["main.py", "--steps", "3"]
    assert process.cwd == str(audit.folder)
    assert process.start_ns < process.end_ns < time.time_ns()


WORKER = (
    "import multiprocessing; context = multiprocessing.get_context('{}'); "
    "p = context.Process(target=__import__, args=('child',)); p.start(); p.join()"
)
CHILDREN = {
    "started": "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)",
    "forked": "import os, sys; pid = os.fork(); pid or exec('import child; sys.exit()'); os.waitpid(pid, 0)",
    "worker": WORKER.format("fork"),
    "spawned worker": WORKER.format("spawn"),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_a_child_has_a_capture_of_its_own(audit, how):
    code = f"""
        import metrale
        if __name__ == "__main__":
            gpu = metrale.open("host")
            x = gpu.buffer(32)
            {CHILDREN[how]}
            x.free()
    """
    child = 'import metrale\ngpu = metrale.open("host")\ngpu.alloc(512, "of the child")\n'
    done = audit("-o", "c.json", "--fail-on-leak", "main.py", main=code, child=child)
    first, second = map(Capture.read, audit.captures())
    assert [b.peak_bytes for b in first.backends] == [32]
    assert [b.peak_bytes for b in second.backends] == [512]
    assert (second.process.parent, audit.captures()[1].name) == (first.process.pid, f"c.{second.process.pid}.json")
    assert done.stderr.count("leaked 1 allocation, 512 bytes") == 1
    assert done.returncode == 1


def test_no_record_is_older_than_the_start(audit):
    audit("-o", "c.json", "main.py", main=CLEAN)
    capture = Capture.read(audit.folder / "c.json")
    assert all(e.time_ns >= capture.process.start_ns for e in capture.backends[0].entries)


def test_ctrl_c_ends_the_program_and_its_capture_is_read(audit):
    (audit.folder / "main.py").write_text(
        'import metrale, time\ngpu = metrale.open("host")\ngpu.alloc(512)\nprint("ready", flush=True)\ntime.sleep(60)\n'
    )
    command = [sys.executable, "-P", "-m", "metrale", "audit", "run", "-o", "c.json", "main.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=audit.folder, start_new_session=True, **pipes) as run:
        assert run.stdout.readline() == "ready\n"
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        said = run.stderr.read()
    assert run.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in said
    assert "leaked 1 allocation, 512 bytes" in said


def test_sigterm_is_passed_on(audit):
    (audit.folder / "main.py").write_text('print("ready", flush=True)\nimport time\ntime.sleep(60)\n')
    command = [sys.executable, "-P", "-m", "metrale", "audit", "run", "main.py"]
    with subprocess.Popen(command, cwd=audit.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        run.stderr.read()
    assert run.returncode == 128 + signal.SIGTERM


def plain(audit, **env):
    """The program by Python alone."""
    command, env = [sys.executable, "main.py"], os.environ | env
    return subprocess.run(command, cwd=audit.folder, env=env, capture_output=True, text=True, timeout=120)


def test_a_variable_alone_records_too(audit):
    (audit.folder / "main.py").write_text(textwrap.dedent(CLEAN))
    done = plain(audit, METRALE_AUDIT="c.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert Capture.read(audit.folder / "c.json").backends[0].peak_bytes == 4096


def test_a_file_that_cannot_be_written_is_an_error_when_a_backend_is_opened(audit):
    (audit.folder / "main.py").write_text(textwrap.dedent(CLEAN))
    done = plain(audit, METRALE_AUDIT="/no/such/c.json")
    assert done.returncode == 1
    assert "ArgumentError: METRALE_AUDIT: got '/no/such/c.json', allowed: a file that can be written" in done.stderr


def test_without_the_variable_the_recorder_is_not_loaded(audit):
    code = CLEAN + '    import sys\n    print([m for m in sys.modules if m.startswith("metrale.audit")])\n'
    (audit.folder / "main.py").write_text(textwrap.dedent(code))
    assert plain(audit).stdout == "[]\n"
