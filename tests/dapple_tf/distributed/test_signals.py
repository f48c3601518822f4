"""Signals reach another thread at once, and only where the handler is the library's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from dapple_tf.distributed.signals import SignalReceiver


@pytest.fixture
def receiver() -> Iterator[SignalReceiver]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = SignalReceiver()
    yield made
    made.uninstall()
    made.close()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_installed_handlers_pass_signals_on(receiver: SignalReceiver, number: signal.Signals) -> None:
    receiver.install()
    os.kill(os.getpid(), number)  # which ends the process by default
    assert receiver.receive() == [number]


def test_ctrl_c_raises_in_the_main_thread_too(receiver: SignalReceiver) -> None:
    receiver.install()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert receiver.interrupted
    assert receiver.receive() == [signal.SIGINT]


def test_the_first_ctrl_c_may_be_spared(receiver: SignalReceiver) -> None:
    receiver.install()
    receiver.spares_interrupt = True
    os.kill(os.getpid(), signal.SIGINT)
    assert receiver.receive() == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_of_the_user_stay_and_their_signals_are_not_received(receiver: SignalReceiver) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    receiver.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    assert receiver.receive() == []


def test_uninstalling_restores_the_defaults(receiver: SignalReceiver) -> None:
    receiver.install()
    receiver.uninstall()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_a_wakeup_without_a_signal_is_no_signal(receiver: SignalReceiver) -> None:
    receiver.install()
    receiver.wake()
    assert receiver.receive() == []
    assert receiver.receive() == []  # nothing is left to read
