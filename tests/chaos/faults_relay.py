"""Faults of the relays of a world with one broker."""

import signal
import time
from random import Random

from tests.chaos.faults import LONGER_THAN_ALL_S, Fault, driver_killed_anywhere
from tests.chaos.relays import Relays
from tests.chaos.waiting import ChaosError
from tests.chaos.world import World


def relay_killed(world: World, chance: Random) -> None:
    """Kill the relay at any moment."""
    _send_a_little(world, chance)
    _relays(world).signal(signal.SIGKILL)


def two_relays(world: World, chance: Random) -> None:
    """Let a second relay stand by from now on, and kill both at any moment after that."""
    _relays(world).wanted = 2
    _relays(world).start_what_is_down()
    _send_a_little(world, chance)
    _relays(world).signal(signal.SIGKILL)


def relay_frozen(world: World, chance: Random) -> None:
    """Freeze the relays by SIGSTOP for longer than their transactions may last, while another one takes over."""
    _send_a_little(world, chance)
    frozen = _relays(world)
    frozen.signal(signal.SIGSTOP)
    # Those that are frozen count as running: the second one takes over.
    frozen.wanted += 1
    frozen.start_what_is_down()
    time.sleep(LONGER_THAN_ALL_S)
    frozen.signal(signal.SIGCONT)
    _send_a_little(world, chance)


def relay_and_broker_killed(world: World, chance: Random) -> None:
    """Kill the broker and the relay together."""
    _send_a_little(world, chance)
    world.kafka.kill()
    _relays(world).signal(signal.SIGKILL)


def relay_and_driver_killed(world: World, chance: Random) -> None:
    """Kill the relay and the job."""
    _relays(world).signal(signal.SIGKILL)
    driver_killed_anywhere(world, chance)


def _send_a_little(world: World, chance: Random) -> None:
    world.wait_for_transactions(chance.randint(1, 10))


def _relays(world: World) -> Relays:
    if world.relays is None:
        raise ChaosError("this world has no relay")
    return world.relays


RELAY_FAULTS = [
    Fault("relay killed", relay_killed, 4),
    Fault("two relays, both killed", two_relays, 3),
    Fault("relay frozen, another takes over", relay_frozen, 2),
    Fault("relay and broker killed", relay_and_broker_killed, 3),
    Fault("relay and driver killed", relay_and_driver_killed, 2),
]
