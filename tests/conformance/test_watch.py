"""What a method's code does beside computing is seen whichever way it takes; what others do on its behalf is not."""

from __future__ import annotations

import pytest

from prunebench.conformance.watch import watching

ACTS = {
    "import os; os.close(os.open(here, 0))": "file",
    "import pathlib; pathlib.Path(here).read_bytes()": "file",
    "import linecache; linecache.getlines(here)": "file",
    "from importlib.machinery import SourceFileLoader as L; L('x', here).get_data(here)": "file",
    "import numpy as np; np.fromfile(here, dtype=np.uint8)": "file",
    "import numpy as np; np.memmap(here, dtype=np.uint8, mode='r')": "file",
    "import torch; torch.from_file(here, size=4, dtype=torch.uint8)": "file",
    "import torch; torch.UntypedStorage.from_file(here, False, 4)": "file",
    "import torch; torch.save({}, here)": "file",
    "import torch, contextlib\nwith contextlib.suppress(Exception): torch.jit.load(here)": "file",
    "import os; os.path.exists(here)": "file",
    "import pathlib; pathlib.Path(here).is_file()": "file",
    "import os; os.readlink('/proc/self/exe')": "file",
    "import os; os.close(os.memfd_create('x'))": "file",
    "import sqlite3; sqlite3.connect(':memory:').close()": "file",
    "import glob; glob.glob('/*')": "file",
    "import socket; [one.close() for one in socket.socketpair()]": "socket",
    "import os; os.system('true')": "process",
    "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)": "process",
    "import _thread; _thread.start_new_thread(int, ())": "process",
    "import logging; logging.currentframe()": "stack",
    "import inspect; inspect.currentframe()": "stack",
    "import traceback; list(traceback.walk_stack(None))": "stack",
    "import sys; getattr(sys, '_get' + 'frame')()": "stack",
    "g = (x for x in []); g.gi_frame": "stack",
    "import gc; gc.get_referrers(here)": "stack",
    "import time; time.sleep(0)": "sleep",
    "import select; select.select([], [], [], 0)": "sleep",
    "import select; select.poll().poll(0)": "sleep",
    "import signal; signal.sigtimedwait([], 0)": "sleep",
    "import threading; threading.Event().wait(0)": "wait",
    "import threading; threading.Lock().acquire(timeout=0)": "wait",
    "import queue, contextlib\nwith contextlib.suppress(queue.Empty): queue.Queue().get(timeout=0.001)": "wait",
    "import torch; torch.ones(1, requires_grad=True).sum().backward()": "gradient",
    "import os; os.chdir('/')": "environment",
}
HONEST = [
    "import torch; torch.ones(2, 2).select(0, 1)",
    "import warnings; warnings.warn('a fit of rank one')",
    "import logging; logging.getLogger('mine').warning('a fit of rank one')",
    "import threading\nwith threading.Lock(): pass",
    "import fractions, decimal, statistics",
    "import functools; functools.lru_cache(lambda x: x)(1)",
    "import collections; collections.namedtuple('Pair', 'a b')",
    "import logging; logging.getLogger('mine').warning('a fit', stack_info=False)",
    "import torch; torch.nn.functional.softmax(torch.ones(2), 0); torch.linalg.svd(torch.eye(3))",
    "import numpy as np; np.linalg.lstsq(np.eye(3), np.ones(3), rcond=None)",
]


def acts_of(text, here):
    code = compile(text, "a-method.py", "exec")
    with watching(frozenset({"a-method.py"}), closely=True) as acts:
        exec(code, {"here": str(here)})  # noqa: S102  the text is this file's
    return {act.kind for act in acts}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "eval.json"
    path.write_bytes(b"data" * 4)
    return path


@pytest.mark.parametrize("text", ACTS)
def test_an_act_is_seen_whichever_way_it_takes(here, text):
    assert ACTS[text] in acts_of(text, here)


@pytest.mark.filterwarnings("ignore:a fit of rank one")
@pytest.mark.parametrize("text", HONEST)
def test_what_libraries_do_on_its_behalf_is_no_act(here, text):
    assert not acts_of(text, here)
