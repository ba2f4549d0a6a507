"""Tests the server on which both services are built, with handlers that only write, over a real socket."""

import asyncio
import logging
import os
import signal
import subprocess
import sys

import grpc
import pytest

from dynatree.common.errors import DeviceFailedError
from dynatree.common.logs import configure_logging
from dynatree.engine.parallel.ranks import RankError
from dynatree.serving.server import LAST_WORDS_SECONDS, Server
from dynatree.serving.service_process import run_service
from tests.support.refusals import said

METHOD = "/dynatree.v1.Example/Write"
MESSAGE = bytes(32_000_000)  # more than is sent before the client reads
KINDS = pytest.mark.parametrize("kind", ["unary-stream", "stream-stream"])


class Handlers:
    def __init__(self, kind):
        self._kind = kind
        self.writing = asyncio.Event()

    @property
    def handler(self):
        if self._kind == "unary-stream":
            return grpc.unary_stream_rpc_method_handler(self._generate)
        return grpc.stream_stream_rpc_method_handler(self._write)

    async def _generate(self, request, context):
        self.writing.set()
        yield MESSAGE

    async def _write(self, requests, context):
        self.writing.set()
        await context.write(MESSAGE)


def start_call(channel, kind):
    if kind == "unary-stream":
        return channel.unary_stream(METHOD)(b"", wait_for_ready=True)
    return channel.stream_stream(METHOD)(iter([b""]), wait_for_ready=True)


async def stop_in_the_midst_of_a_message(address, kind, read_on):
    """Return the status of a call that is ended during its first message, and the timeouts given to gRPC.

    The client continues to read while the server stops, or after it has stopped.
    """
    server, graces = Server(["dynatree.v1.Example"]), []
    grpc_stop = server.grpc_server.stop
    server.grpc_server.stop = lambda grace: graces.append(grace) or grpc_stop(grace)
    handlers = Handlers(kind)
    server.grpc_server.add_registered_method_handlers("dynatree.v1.Example", {"Write": handlers.handler})
    await server.start(address)
    with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        call = start_call(channel, kind)
        await handlers.writing.wait()
        await asyncio.sleep(0.2)  # the client reads nothing
        stop = asyncio.ensure_future(server.stop(grace=0))
        if read_on:
            await asyncio.sleep(0.2)
        else:
            await stop

        def read():
            with pytest.raises(grpc.RpcError) as error:
                list(call)
            return error.value.code(), said(error.value)

        status = await asyncio.to_thread(read)
        await stop
    return status, graces


@KINDS
def test_a_call_that_is_ended_while_a_message_is_on_its_way_is_told_why(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("dynatree.serving.server.LAST_WORDS_SECONDS", 60)  # long enough on a busy machine
    status, _ = asyncio.run(stop_in_the_midst_of_a_message(f"unix:{tmp_path}/socket", kind, read_on=True))
    assert status == (grpc.StatusCode.UNAVAILABLE, "the service is shutting down")


@KINDS
def test_a_client_that_reads_nothing_does_not_hold_up_a_stop(tmp_path, kind):
    status, graces = asyncio.run(stop_in_the_midst_of_a_message(f"unix:{tmp_path}/socket", kind, read_on=False))
    assert status[0] is grpc.StatusCode.UNAVAILABLE
    assert graces[-1] == LAST_WORDS_SECONDS, "the time that a peer has to take its status"


def test_a_call_that_a_stop_cancels_is_no_error_in_the_log(caplog):
    async def serve():
        for error in (asyncio.CancelledError(), ValueError("of another kind")):
            try:
                raise error
            except BaseException:
                logging.getLogger("grpc._cython.cygrpc").exception("not handled")

    configure_logging("text")
    assert run_service(serve()) == 0
    assert "of another kind" in caplog.text
    assert "CancelledError" not in caplog.text


# A service that leaves a call, which never ends, or ends before the service does.
LEAVING = """
import asyncio, sys, threading
from dynatree.engine.model_thread import ModelThread, calls_left
from dynatree.serving.service_process import run_service

async def serve():
    thread, begun, free = ModelThread("left"), threading.Event(), threading.Event()
    thread.run(lambda: (begun.set(), free.wait()))
    begun.wait()
    thread.shutdown(wait=False)
    if sys.argv[1] == "ends":
        free.set()
        while calls_left():
            await asyncio.sleep(0.001)
    thread.shutdown()
    print("served", end=" ")

status = run_service(serve(), calls_left)
print("returned")
sys.exit(status)
"""


@pytest.mark.parametrize(("call", "written"), [("stays", b"served "), ("ends", b"served returned\n")])
def test_a_service_does_not_wait_for_calls_that_it_left(call, written):
    """Python would join the threads of executors when the process ends."""
    result = subprocess.run([sys.executable, "-c", LEAVING, call], stdout=subprocess.PIPE, timeout=120)
    assert (result.returncode, result.stdout) == (0, written)


class AcceleratorError(RuntimeError):
    """The error that torch raises when a kernel has made the device unusable."""


@pytest.mark.parametrize(
    ("error", "poisons"),
    [
        (AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RankError("the ranks of the model are no longer in step"), True),
        (DeviceFailedError("5 choices in a row had logits that are not finite"), True),
        (ValueError("of another kind"), False),
        (MemoryError(), False),
    ],
)
def test_a_device_that_has_failed_ends_the_service(tmp_path, error, poisons):
    """A supervisor restarts it; until then it serves nobody, rather than wrongly."""

    async def fail(request, context):
        raise RuntimeError("the forward failed") from error

    async def status():
        server = Server(["dynatree.v1.Example"])
        failing = {"Write": grpc.unary_unary_rpc_method_handler(fail)}
        server.grpc_server.add_registered_method_handlers("dynatree.v1.Example", failing)
        await server.start(f"unix:{tmp_path}/socket")
        waiting = asyncio.ensure_future(server.wait(grace=0.0))
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(METHOD)(b"", wait_for_ready=True)
        ended, _ = await asyncio.wait([waiting], timeout=60.0 if poisons else 0.5)
        if not ended:
            waiting.cancel()
            await server.stop(0.0)
        return caught.value.code(), isinstance(waiting.exception(), DeviceFailedError) if ended else False

    code = grpc.StatusCode.UNAVAILABLE if poisons else grpc.StatusCode.INTERNAL
    assert asyncio.run(status()) == (code, poisons)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_soon_as_the_service_is_ready_stops_it_in_order(tmp_path, caplog, number):
    caplog.set_level(logging.INFO, "dynatree")
    before = signal.getsignal(number)

    async def serve():
        server = Server(["example"])
        await server.start(f"unix:{tmp_path}/example.sock")
        await asyncio.wait_for(server.wait(5.0, lambda: signal.raise_signal(number)), 30)

    asyncio.run(serve())
    assert [record.message for record in caplog.records][-2:] == ["shutting down, 0 open calls", "shut down"]
    assert signal.getsignal(number) is before


# A stand-in for torch that reports its import, and takes time.
SLOW_TORCH = "import time; print('importing', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_torch_is_imported_ends_the_process_at_once(tmp_path, number, status):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    command = [sys.executable, "-m", "dynatree.cli.main", "verify", "--target-model", "embedded"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [*command, "--listen", "localhost:0"], env=environment, text=True, preexec_fn=heed, **pipes
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        errors = process.communicate(timeout=30)[1]
        assert all(" INFO " in line for line in errors.splitlines()), errors
    assert process.returncode == status


def heed():
    """Undo that background jobs of a shell, and their children, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
