"""Which producer groups cannot answer, as the job finds out (R15): the product's `CheckLag` over simulated topics."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from halfway.pipelines.kafka.java_admin import TopicPlace
from halfway.pipelines.resolve import check_lag
from halfway.pipelines.resolve.check_lag import OldRequests, RequestOffsets
from halfway.pipelines.resolve.groups import producer_groups
from halfway.schemas.headers import PGROUP, check_group
from halfway.schemas.settings import Settings
from tests.simulation.history import CHECK, HALF
from tests.simulation.log import Kafka


class SimulatedLag(check_lag.CheckLag):
    """Asks the simulated Kafka what the product asks the real one."""

    def __init__(self, settings: Settings, kafka: Kafka) -> None:
        nothing: Any = None
        super().__init__(nothing, settings.kafka, nothing)
        self._simulated, self._wait_ms = kafka, settings.resolution.transactionCheckInterval // 2

    def unable(self) -> tuple[list[str], float]:
        """Return the groups that are away or behind, and up to when checks count, as `GroupWatch` does."""
        now_ms, now_s, wait_s = self._simulated.broker_ms(HALF, 0), self._simulated.clock.now_ms / 1000, self._wait_ms / 1000
        groups = self._simulated.groups
        known = set(producer_groups(name for name, group in groups.items() if group.is_known))
        away = {group for group in known if not groups[check_group(group)].members}
        behind = self.behind(known - away, now_ms - self._wait_ms, now_s, now_s - wait_s)
        has_seen = bool(self._ends) and self._ends[0][0] <= now_s - wait_s
        # A round comes before the batch of its step, which sends checks at the same time.
        return sorted(away | behind.keys()), self.known_s - 0.0005 if has_seen else self.known_s

    def _offsets(self, topics: Collection[str], before_ms: int) -> dict[TopicPlace, RequestOffsets]:
        found = {}
        for number, partition in enumerate(self._simulated.topics[CHECK] if topics else ()):
            later = (record.offset for record in partition.records[partition.first :] if record is not None and record.at_ms >= before_ms)
            end = partition.end
            found[self._kafka.check_topic, number] = RequestOffsets(partition.first, next(later, end), end, end)
        return found

    def _committed(self, groups: Iterable[str], _: Collection[TopicPlace]) -> dict[str, dict[TopicPlace, int]]:
        committed = {group: self._simulated.groups[check_group(group)].committed for group in groups}
        topic = self._kafka.check_topic
        return {group: {(topic, partition): offset for partition, offset in offsets.items()} for group, offsets in committed.items()}

    def _first_requests(self, _: Any, place: TopicPlace, wanted: Mapping[str, int], old: OldRequests, __: float) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self._simulated.read((CHECK, place[1]), min(wanted.values()), old.end, committed_only=False):
            group = record.header(PGROUP)
            if wanted.get(group, old.end) <= record.offset:
                found.setdefault(group, record.offset)
        return found
