"""What is read off a method's code: what is found in it, and what honest code is left alone."""

from __future__ import annotations

import ast

import pytest

from prunebench.conformance.code import (
    ends_processes,
    foreign_imports,
    keys_on_sizes,
    looks_around,
    private_names,
    waits,
)

FOUND = {
    foreign_imports: [
        "import transformers",
        "import importlib",
        "from importlib import import_module",
        "import pkgutil",
        "import runpy",
        "__import__('transformers')",
        "__builtins__['__import__']('transformers')",
        "exec('import transformers')",
        "import prunebench.moe",
        "from prunebench.moe import MoEModel",
        "from prunebench import Session",
        "import prunebench\nprunebench.moe.hooks",
        "import prunebench as p\np.conformance",
        "from . import helper",
        "from .helper import name",
    ],
    looks_around: [
        "import sys\nsys.argv",
        "import sys as s\ns.orig_argv[1:]",
        "from sys import argv",
        "import sys\n'prunebench.run' in sys.modules",
        "import os\nos.environ.get('MODEL')",
        "from os import getenv as get",
        "import sys\ngetattr(sys, 'argv')",
        "import os\ngetattr(os, 'environ')['MODEL']",
        "import torch\ntorch.hub.sys.modules",
        "import torch\ntorch.serialization.os.environ",
        "import os\nos.path.expandvars('$MODEL')",
        "import os.path\nos.path.expandvars('$MODEL')",
        "from os import path as p\np.expandvars('$MODEL')",
        "from os.path import expandvars",
        "import argparse\nargparse.ArgumentParser().parse_known_args()",
        "import platform\nplatform.node()",
        "import contextvars\ncontextvars.copy_context()",
    ],
    waits: [
        "import time\nlist(map(time.sleep, [1]))",
        "import functools, time\nfunctools.partial(time.sleep, 1)()",
        "from time import sleep as nap",
        "import signal\nsignal.alarm(1)",
    ],
    ends_processes: [
        "import os\nos._exit(0)",
        "import os\ngetattr(os, 'abort')()",
        "from os import kill",
        "import signal\nsignal.raise_signal(9)",
    ],
    private_names: [
        "layer._layer",
        "layer.shape.__dict__",
        "vars(layer)",
        "getattr(layer, '_layer')",
        "getattr(layer, '_' + 'layer')",
        "import inspect\ninspect.getattr_static(layer, '_' + 'layer')",
        "import operator\noperator.attrgetter('_layer.experts')(layer)",
        "object.__getattribute__(layer, '_layer')",
        "layer.__reduce_ex__(4)",
        "match layer:\n    case object(_layer=inner):\n        pass",
    ],
    keys_on_sizes: [
        "layer.width == 2048",
        "w = layer.width\nif w == 2048: pass",
        "layer.width in {2048, 4096}",
        "(layer.experts, layer.width) == (64, 2048)",
        "len(layers) == 16",
        "E, D = layer.router_rows_ED.shape\nD == 2048",
        "layer.router_rows_ED.size(1) == 2048",
        "OLMOE = 2048\nlayer.width == OLMOE",
        "GOOD = {2048: (1, 2)}\nGOOD.get(layer.width)",
        "GOOD = {2048: (1, 2)}\nw = layer.width\nGOOD[w]",
        "{2048: 1}[layer.width]",
        "match layer.width:\n    case 2048:\n        pass",
    ],
}
LEFT_ALONE = {
    foreign_imports: [
        "import prunebench\nprunebench.Mask",
        "from prunebench import Mask",
        "import torch.nn.functional as F",
        "from numpy import linalg",
        "import collections.abc",
        "model.eval()",
    ],
    looks_around: ["import sys\nsys.float_info", "layer.argv", "import os\nos.path.join('a', 'b')", "modules = 1"],
    waits: ["import time\ntime.perf_counter()", "layer.sleep", "from mine import sleep"],
    ends_processes: ["import os\nos.getpid()", "layer.kill"],
    private_names: [
        "self._score(layer)",
        "np._globals",
        "pair._replace(a=1)",
        "pair._asdict()",
        "super().__init__()",
        "getattr(self, name)",
        "getattr(layer, 'width')",
        "vars(self)",
    ],
    keys_on_sizes: [
        "layer.experts > 1",
        "rank = min(layer.width, 64)",
        "if len(rows) < 32: pass",
        "x_SD.shape == y_SD.shape",
        "n = layer.width\nnp.zeros(n)[:8]",
        "count_E[5] == 0",
        "self.limit == layer.experts",
        "POWERS = (0.5, 1.0, 2.0)\nPOWERS.index(self.power)",
        "layer.stats.get('count')",
    ],
}


@pytest.mark.parametrize(("reader", "text"), [(reader, text) for reader, texts in FOUND.items() for text in texts])
def test_what_is_not_allowed_is_found(reader, text):
    assert list(reader(ast.parse(text)))


@pytest.mark.parametrize(("reader", "text"), [(reader, text) for reader, texts in LEFT_ALONE.items() for text in texts])
def test_honest_code_is_left_alone(reader, text):
    assert not list(reader(ast.parse(text)))
