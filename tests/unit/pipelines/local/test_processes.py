"""Ports and processes of this machine."""

import socket
import subprocess

from halfway.pipelines.local.processes import HOST, PORTS, command_line, end_process, free_port, is_free, wait_until


def test_no_process_listens_on_a_free_port() -> None:
    port = free_port()
    assert port in PORTS
    assert is_free(port)
    with socket.create_server((HOST, port)):
        assert not is_free(port)


def test_a_child_process_is_ended_even_if_it_ignores_sigterm() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert wait_until(lambda: command_line(child.pid) == ["sleep", "60"], 5)
        assert end_process(child.pid, child, 10)
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        assert end_process(stubborn.pid, stubborn, 0.3)
        assert stubborn.poll() == -9


def test_a_process_that_is_no_child_is_ended_and_waited_for() -> None:
    shell = subprocess.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    pid = int(shell.stdout)
    assert end_process(pid, None, 10)
    assert wait_until(lambda: not command_line(pid), 5)


def test_waiting_ends_with_the_condition_or_the_limit() -> None:
    answers = iter([False, True])
    assert wait_until(lambda: next(answers), 5)
    assert not wait_until(lambda: False, 0)
