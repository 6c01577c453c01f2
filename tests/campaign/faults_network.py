"""Faults between programs and servers."""

from __future__ import annotations

from tests.campaign.field import Field, fault


@fault("connections cut")
def cut(field: Field) -> str:
    field.stage.front.cut()
    return "all"


@fault("half-open connections, the programs' ends stay")
def half_open_client(field: Field) -> str:
    field.stage.front.half_open(client=True)
    field.last(3, 6)
    field.stage.front.reap()
    return "all"


@fault("half-open connections, the server's ends stay")
def half_open_server(field: Field) -> str:
    field.stage.front.half_open(client=False)
    field.last(3, 6)
    field.stage.front.reap()
    return "all"


@fault("network that passes nothing on for a while")
def hold(field: Field) -> str:
    field.stage.front.hold()
    field.last(3, 7)
    field.stage.front.go_on()
    return "all"


@fault("server out of reach")
def refuse(field: Field) -> str:
    field.stage.front.refuse(True)
    field.stage.front.cut()
    field.last(3, 6)
    field.stage.front.refuse(False)
    return "all"
