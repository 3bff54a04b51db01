"""Reads rendered files with SkyPilot's and xpk's own loaders, in an environment of theirs: prints one JSON line a file.

python their_loaders.py skypilot|xpk FILE...
"""

import argparse
import json
import pathlib
import shlex
import sys


def skypilot(path: str) -> dict:
    import sky

    task = sky.Task.from_yaml(path)
    (resources,) = task.resources
    return {"nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot}


def xpk(path: str) -> dict:
    from xpk.core.system_characteristics import get_system_characteristics
    from xpk.parser.core import set_parser

    parser = argparse.ArgumentParser()
    set_parser(parser)
    given = parser.parse_args(shlex.split(pathlib.Path(path).read_text().replace("\\\n", ""), comments=True)[1:])
    found, _ = get_system_characteristics(given)
    hosts = found.vms_per_slice * given.num_slices if given.tpu_type else given.num_nodes
    return {"hosts": hosts, "chips": found.chips_per_vm, "label": found.gke_accelerator, "command": given.command}


for file in sys.argv[2:]:
    print(json.dumps({"skypilot": skypilot, "xpk": xpk}[sys.argv[1]](file)))
