"""The world around one gateway: its wall clock jumps, its disk is full, its stores are slow. See `preload/world.c`."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import struct
import subprocess
import threading
from pathlib import Path

SOURCE = Path(__file__).parent / "preload" / "world.c"


class World:
    """What one process finds: to be given to it as `env`."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        library, state = folder.parent / "world.so", folder.parent / "world.state"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        state.write_bytes(bytes(16))
        with open(state, "r+b") as file:
            self._state = mmap.mmap(file.fileno(), 16)
        self.env = {"LD_PRELOAD": str(library), "PENSTOCK_WORLD": str(state), "PENSTOCK_WORLD_FOLDER": str(folder)}

    def clock(self, seconds: int) -> None:
        """The wall clock is off by so much."""
        self._state[:8] = struct.pack("<q", seconds)

    def disk(self, full: bool) -> None:
        """Whether files below the folder can be written."""
        self._state[8:] = struct.pack("<q", int(full))


class Slow:
    """A Unix socket in front of another, over which every answer comes late."""

    def __init__(self, folder: Path, behind: Path, name: str):
        self.path, self.behind, self.seconds = folder / name, behind, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_unix_server(self._serve, self.path)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        """Ends what is passed on: a task that is left over is reported when the interpreter ends."""
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answers, asks = await asyncio.open_unix_connection(self.behind)
            await asyncio.gather(self._pass(reader, asks, False), self._pass(answers, writer, True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                if late and self.seconds:
                    await asyncio.sleep(self.seconds)
                writer.write(piece)
                await writer.drain()
        writer.close()
