"""A Kafka broker of its own, fetched by Maven, that tests may kill, stop and start again."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.waiting import until

VERSION = "4.1.0"

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>gdq</groupId><artifactId>kafka</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
</dependencies></project>
"""

CONFIG = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={logs}
num.partitions=3
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
"""


@pytest.fixture(scope="session")
def kafka_classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What Java needs to run a broker; Maven fetches it where it is not there yet."""
    for name in ("mvn", "java"):
        if shutil.which(name) is None:
            pytest.skip(f"Kafka cannot be run: there is no {name}")
    folder = tmp_path_factory.mktemp("kafka")
    (folder / "pom.xml").write_text(POM)
    command = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"Maven cannot fetch Kafka {VERSION}")
    return (folder / "classpath").read_text().strip()


class KafkaBroker:
    """A broker at one port, whose topics survive its end. `logs`: where it keeps them, if not in its folder."""

    def __init__(self, classpath: str, folder: Path, logs: Path | None = None) -> None:
        self._java = ["java", "-Xmx512m", "-cp", classpath]
        self._folder = folder
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, controller = int(one.getsockname()[1]), int(other.getsockname()[1])
        self._config = folder / "server.properties"
        self._config.write_text(CONFIG.format(port=self.port, controller=controller, logs=logs or folder / "logs"))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = [*self._java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", os.fspath(self._config)]
        subprocess.run(command, capture_output=True, check=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            command = [*self._java, "kafka.Kafka", os.fspath(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, "the Kafka broker", pause=0.1)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        assert self._process
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def make_topic(self, name: str, **config: str) -> None:
        """A topic of three partitions."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        given = {option.replace("_", "."): value for option, value in config.items()}
        admin.create_topics([NewTopic(name, 3, config=given)])[name].result(60)

    def count(self, topic: str) -> int:
        """How long the partitions of a topic are, with the marks of transactions."""
        reader = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": "test"})
        try:
            places = [confluent_kafka.TopicPartition(topic, number) for number in range(3)]
            return sum(reader.get_watermark_offsets(place, 60)[1] for place in places)
        finally:
            reader.close()

    def records(self, topic: str) -> list[confluent_kafka.Message]:
        """All committed records of a topic, each partition in order."""
        settings = {"group.id": "test", "isolation.level": "read_committed", "enable.partition.eof": True}
        reader = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "enable.auto.commit": False} | settings)
        found: list[confluent_kafka.Message] = []
        try:
            places = [confluent_kafka.TopicPartition(topic, number, 0) for number in range(3)]
            missing = {place.partition: reader.get_watermark_offsets(place, 60)[1] for place in places}
            reader.assign(places)
            while missing:
                message = reader.poll(60)
                assert message is not None
                error = message.error()
                if error is None:
                    found.append(message)
                else:
                    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                    partition, offset = message.partition(), message.offset()
                    assert partition is not None
                    assert offset is not None
                    if offset >= missing.get(partition, 0):
                        missing.pop(partition, None)
        finally:
            reader.close()
        return found

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def kafka_broker(classpath: str, folder: Path, logs: Path | None = None) -> Iterator[KafkaBroker]:
    """A running broker, killed in the end."""
    broker = KafkaBroker(classpath, folder, logs)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()
