"""What machine code for Hopper (SASS) takes of an SM, and what its main loop does."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Loop:
    """The longest loop of a program: its instructions; copies of 16 bytes from global to shared
    memory that nobody waits for; loads into registers, which the thread does wait for; names of
    instructions for tensor cores; and how many groups of copies are under way still where it waits
    for the first.
    """

    num_instructions: int
    copies_of_16: int
    waited_loads: int
    tensor_cores: list[str]
    left_under_way: int


def taken_by(code) -> dict[str, int]:
    """Bytes of the stack, where registers are spilled to, and of shared memory."""
    [(stack, shared)] = re.findall(r"STACK:(\d+) SHARED:(\d+)", _told("-res-usage", code))
    return {"stack": int(stack), "shared": int(shared) + code.metadata.shared}


def programs_of(code) -> int:
    """How many programs an SM holds at once: of 64 Ki registers, 227 KB, and 64 warps."""
    [registers] = re.findall(r"REG:(\d+)", _told("-res-usage", code))
    warps = code.metadata.num_warps
    by_registers = 65_536 // (warps * -(-int(registers) * 32 // 256) * 256)
    return min(by_registers, 228 * 1024 // (taken_by(code)["shared"] + 1024), 64 // warps)


def loop_of(code) -> Loop:
    """What the program repeats most instructions of."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);", _told("-sass", code))
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = [
        (places[target], end)
        for end, (_, text) in enumerate(lines)
        if (found := re.match(r"BRA.* 0x([0-9a-f]+)", text))
        and (target := int(found[1], 16)) in places
        and places[target] < end
    ]
    start, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    texts = [text for _, text in lines[start : end + 1]]
    names = [text.split()[0] for text in texts]
    waits = [re.match(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", text) for text in texts]
    return Loop(
        num_instructions=len(names),
        copies_of_16=sum(name.startswith("LDGSTS") and name.endswith(".128") for name in names),
        waited_loads=sum(re.match(r"LDG\b(?!STS)", name) is not None for name in names),
        tensor_cores=sorted({name for name in names if re.match(r"[HI]G?MMA", name)}),
        left_under_way=min((int(wait[1], 16) for wait in waits if wait), default=0),
    )


def _told(option: str, code) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
