"""The sink of Kafka: the records of a batch and the relay's position are one transaction of Kafka."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdq.consumers.relay.sink import Record, Settings, check_template
from gdq.errors import GdqError, SinkUnavailable
from gdq.extra import extra_named
from gdq.retry import DeadLetter, RetryOutcome

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

# The topic where relays keep their positions, each under its own key.
POSITIONS = "gdq.positions"

_TOPIC_CHARACTERS = re.compile(r"[^a-zA-Z0-9._-]")
_POLL_SECONDS = 0.1


@extra_named()
def open_sink(address: str, given: Mapping[str, str]) -> KafkaSink:
    """The sink of the topics of Kafka: kafka://HOST:PORT,.../TOPIC with places such as {table}."""
    return KafkaSink(address, given)


class KafkaSink:
    """Sends each batch in one transaction, together with what the relay notes of it.

    Settings: timeout (seconds for a transaction to begin or end), positions (the topic of positions), and all that
    librdkafka has, such as security.protocol. A producer that failed is given up: the next one, under the same
    transactional.id, ends its transaction and learns what was committed.
    """

    def __init__(self, address: str, given: Mapping[str, str]) -> None:
        import confluent_kafka  # noqa: F401, PLC0415 (of an extra: missed here, not at the first record)

        settings = Settings("kafka", given)
        self._timeout = settings.number("timeout", 30, least=0.001)
        self._positions = settings.text("positions", POSITIONS)
        self._config: dict[str, Any] = settings.prefixed("")
        hosts, _, self._topic = address.partition("://")[2].partition("/")
        if not hosts or not self._topic:
            raise GdqError(f"{address!r} must name a broker and a topic", hint="kafka://host:9092/shop.{table}")
        check_template(self._topic)
        self._config = {"bootstrap.servers": hosts, "partitioner": "murmur2_random", "linger.ms": 5} | self._config
        # Records that a broker has refused, and why.
        self._refused: dict[str, str] = {}
        self._again = False
        self._failure: KafkaError | None = None
        self._producer: Producer | None = None
        self._relay = ""
        self._noted: str | None = None

    def topic(self, record: Record) -> str:
        """The topic to which a record is sent."""
        return record.place(self._topic, _name)

    def begin(self, relay: str) -> str | None:
        """Begin a transaction; returns what the last committed one has noted."""
        import confluent_kafka  # noqa: PLC0415 (of an extra)

        with _mapped(self._give_up):
            if self._producer is None:
                config = {"transactional.id": f"gdq/{relay}"} | self._config
                try:
                    # the client tells of lost connections on standard error, unless asked
                    self._producer = confluent_kafka.Producer(config | {"error_cb": _say_nothing, "log_level": 0})
                except confluent_kafka.KafkaException as error:
                    raise GdqError(f"kafka: {error.args[0].str()}") from error
                self._producer.init_transactions(self._timeout)
                self._noted = _read_note(self._config, self._positions, relay, self._timeout)
            self._relay = relay
            self._again, self._failure = False, None
            self._producer.begin_transaction()
        return self._noted

    def send(self, lanes: Sequence[Sequence[Record]]) -> Iterator[tuple[Record, RetryOutcome | None]]:
        """Add records to the transaction; the broker's word comes with commit()."""
        for lane in lanes:
            for record in lane:
                outcome = self._add(record)
                yield record, outcome
                if outcome is not None:
                    break

    def commit(self, note: str) -> bool:
        """Commit with a note for the next begin(); False if a record was refused: then nothing was sent, send again."""
        producer = self._begun()
        with _mapped(self._give_up):
            failed = self._unless_refused(self._positions, note.encode(), self._relay.encode(), partition=0)
            producer.flush(self._timeout)
            if self._again:
                self._give_up()  # what an abort purges may be records that are added after it
                return False
            if failed is not None:
                raise failed
            if self._failure is not None:
                raise SinkUnavailable(f"Kafka takes nothing: {self._failure.str()}")
            self._commit(producer)
        self._noted = note
        return True

    def abort(self) -> None:
        """Give the transaction up: its producer too, whose successor learns how it ended."""
        self._give_up()

    def close(self) -> None:
        """Close the connections."""
        self._give_up()

    def _add(self, record: Record) -> RetryOutcome | None:
        if record.id in self._refused:
            return DeadLetter(self._refused[record.id])
        headers = [("gdq-id", record.id), ("content-type", record.content_type), *record.headers.items()]
        key = record.encoded_key or (None if record.key is None else record.key.encode())

        def told(error: KafkaError | None, _message: object) -> None:
            if error is None:
                return
            if _is_refusal(error):
                self._refused[record.id] = f"Kafka: {error.str()}"
                self._again = True
            else:
                self._failure = self._failure or error

        # without a key all are in one partition, for their order
        partition = 0 if key is None else -1
        topic = self.topic(record)
        failed = self._unless_refused(topic, record.value, key, partition=partition, headers=headers, on_delivery=told)
        if failed is None:
            return None
        if _is_refusal(failed.args[0]):
            return DeadLetter(f"Kafka: {failed.args[0].str()}")
        raise _unavailable(failed) from failed

    def _unless_refused(self, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> Exception | None:
        """Produce a record, unless one of the transaction was refused: then it takes no more. Returns what failed."""
        if self._again:
            return None
        try:
            self._produce(topic, value, key, **more)
        except _kafka_exception() as error:
            if not _is_refusal(error.args[0]):
                self._begun().flush(self._timeout)  # the broker's word on the others may be why
            return None if self._was_refused() else error
        return None

    def _was_refused(self) -> bool:
        """Whether the broker has refused a record of the transaction by now."""
        return self._again

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> None:
        producer = self._begun()
        end = time.monotonic() + self._timeout
        while True:
            try:
                producer.produce(topic, value, key, **more)
            except BufferError:
                if time.monotonic() > end:
                    raise SinkUnavailable("Kafka takes nothing: the client's queue is full") from None
                producer.poll(_POLL_SECONDS)
            else:
                producer.poll(0)
                return

    def _commit(self, producer: Producer) -> None:
        """Commit; while its outcome is not known, ask again."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                producer.commit_transaction(self._timeout)
            except _kafka_exception() as error:
                if not error.args[0].retriable() or time.monotonic() > end:
                    raise
            else:
                return

    def _begun(self) -> Producer:
        if self._producer is None:
            raise AssertionError("no transaction was begun")
        return self._producer

    def _give_up(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            with warnings.catch_warnings(), contextlib.suppress(_kafka_exception()):
                # it has no transaction, or cannot end it: its successor does
                warnings.simplefilter("ignore", RuntimeWarning)
                producer.close()


class _mapped:  # noqa: N801 (used as a function)
    """Turns errors of the client into SinkUnavailable, or GdqError if another relay has taken over."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        self._give_up()
        if isinstance(error, _kafka_exception()):
            raise _unavailable(error) from error


def _unavailable(error: BaseException) -> GdqError:
    import confluent_kafka  # noqa: PLC0415 (of an extra)

    cause = error.args[0]
    fenced = (confluent_kafka.KafkaError._FENCED, confluent_kafka.KafkaError.PRODUCER_FENCED)
    if cause.code() in (*fenced, confluent_kafka.KafkaError.INVALID_PRODUCER_EPOCH):
        return GdqError("another relay of this consumer has taken over", hint="Run one relay for each consumer.")
    return SinkUnavailable(f"Kafka takes nothing: {cause.str()}")


def _kafka_exception() -> type[Exception]:
    import confluent_kafka  # noqa: PLC0415 (of an extra)

    return confluent_kafka.KafkaException


def _is_refusal(error: KafkaError) -> bool:
    """Whether the one record is wrong: it is too large, or the topic does not take such records."""
    import confluent_kafka  # noqa: PLC0415 (of an extra)

    kind = confluent_kafka.KafkaError
    return error.code() in (kind.MSG_SIZE_TOO_LARGE, kind.RECORD_LIST_TOO_LARGE, kind.INVALID_RECORD, kind.INVALID_MSG)


def _read_note(config: Mapping[str, Any], topic: str, relay: str, timeout: float) -> str | None:
    """The last committed note of a relay; makes the topic if it is missing."""
    import confluent_kafka  # noqa: PLC0415 (of an extra)
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

    own = {name: value for name, value in config.items() if not name.startswith(_PRODUCERS_OWN)}
    own |= {"error_cb": _say_nothing, "log_level": 0}
    admin = AdminClient(own)
    made = admin.create_topics([NewTopic(topic, 1, config={"cleanup.policy": "compact"})], operation_timeout=timeout)
    try:
        made[topic].result(timeout)
    except confluent_kafka.KafkaException as error:
        if error.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
            raise
    settings = {"group.id": "gdq", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = confluent_kafka.Consumer(own | settings | {"isolation.level": "read_committed"})
    try:
        place = confluent_kafka.TopicPartition(topic, 0, 0)
        last = _end_of(consumer, place, timeout)
        consumer.assign([place])
        return _last_note(consumer, relay, last, timeout)
    finally:
        consumer.close()


def _end_of(consumer: Any, place: Any, timeout: float) -> int:
    """The offset after a partition's last message. A topic that was just made may not be known to a broker yet."""
    import confluent_kafka  # noqa: PLC0415 (of an extra)

    kind, end = confluent_kafka.KafkaError, time.monotonic() + timeout
    while True:
        try:
            _, last = consumer.get_watermark_offsets(place, timeout)
        except confluent_kafka.KafkaException as error:
            early = kind._UNKNOWN_PARTITION, kind.UNKNOWN_TOPIC_OR_PART, kind.LEADER_NOT_AVAILABLE
            if error.args[0].code() not in early or time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return int(last)


def _last_note(consumer: Any, relay: str, last: int, timeout: float) -> str | None:
    """Read up to an offset, also if another relay's transaction is open before it."""
    import confluent_kafka  # noqa: PLC0415 (of an extra)

    found, end = None, time.monotonic() + max(timeout, _TRANSACTION_SECONDS)
    while last > 0:
        message = consumer.poll(_POLL_SECONDS)
        if time.monotonic() > end:
            raise SinkUnavailable("Kafka takes nothing: the topic of positions cannot be read to its end")
        if message is None:
            continue
        error = message.error()
        if error is None:
            if message.key() == relay.encode():
                found = (message.value() or b"").decode() or None
            if message.offset() + 1 >= last:
                break
        elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
            if message.offset() >= last:
                break
        else:
            raise confluent_kafka.KafkaException(error)
    return found


# Settings that only a producer takes.
_PRODUCERS_OWN = (
    "transactional", "transaction.", "linger.", "batch.", "compression.", "partitioner", "queue.buffering",
    "message.timeout", "enable.idempotence", "acks",
)  # fmt: skip
# What librdkafka lets a transaction take unless told otherwise, and some more.
_TRANSACTION_SECONDS = 90.0


def _say_nothing(_error: object) -> None:
    """An error of a connection comes back to whoever sends, too."""


def _name(text: str) -> str:
    """A value as part of a topic's name; what a name cannot have is an underscore."""
    return _TOPIC_CHARACTERS.sub("_", text) or "_"
