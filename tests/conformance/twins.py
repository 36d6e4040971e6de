"""The broken twins: for each check, the honest method with one thing wrong, as edits of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prunebench.conformance import Limits

HONEST = (Path(__file__).parent / "honest.txt").read_text(encoding="utf-8")
SELECT = "        return prune_lowest(layers, budget, self.score)\n"
SCORE = "        return squares_E / np.maximum(count_E, 1) ** self.power\n"
REPLACE = "        return Replacements({expert: self.fill(mean_ED[expert], 0.1) for expert in pruned})\n"
FORWARD = "        return self.mean_D + self.slope_D * x_SD\n"


@dataclass(frozen=True)
class Twin:
    """A broken method: what it does, the one check that it fails, and (old, new) for each edit."""

    check: str
    does: str
    edits: tuple[tuple[str, str], ...]
    limits: Limits | None = None

    @property
    def text(self) -> str:
        text = HONEST
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.does}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        return text


def twin(check: str, does: str, *edits: tuple[str, str], limits: Limits | None = None) -> Twin:
    return Twin(check, does, edits, limits)


def before(anchor: str, *lines: str) -> tuple[str, str]:
    """An edit that puts lines before another, indented like it."""
    indent = anchor[: len(anchor) - len(anchor.lstrip())]
    return anchor, "".join(f"{indent}{line}\n" for line in lines) + anchor


def instead(anchor: str, *lines: str) -> tuple[str, str]:
    """An edit that puts lines in the place of another."""
    return anchor, before(anchor, *lines)[1].removesuffix(anchor)


def imports(name: str) -> tuple[str, str]:
    return before("import numpy as np\n", f"import {name}")


TWINS = [
    # interface
    twin("metadata", "has no reference", ('reference = "a test"', 'reference = ""')),
    twin(
        "parameters",
        "has a parameter that JSON cannot hold",
        ("power: float = 1.0", "power: float = 1.0\n    seen: frozenset = frozenset()"),
    ),
    twin("frozen", "can be changed", (HONEST[-20:], HONEST[-20:] + "\n\nHonest.__setattr__ = object.__setattr__\n")),
    twin(
        "signatures",
        "takes an option that nobody records",
        ("def replace(self, layer, pruned)", "def replace(self, layer, pruned, verbose=False)"),
    ),
    twin("needs", "returns a list", ("return (Count(), GateSquareSum())", "return [Count(), GateSquareSum()]")),
    twin(
        "imports",
        "imports from inside the package",
        before(
            "from prunebench import Count, Fill, Method, OutputMoments, Replacements, Statistic, prune_lowest\n",
            "from prunebench.mask import LayerMask",
        ),
    ),
    twin("no_private_names", "looks behind its view", before(REPLACE, "layer._layer.width")),
    twin(
        "no_key_on_sizes",
        "knows a model by its width",
        before(SCORE, "if layer.width == 2048:", "    return -squares_E"),
    ),
    # purity
    twin("runs", "returns a dict for a mask", instead(SELECT, "return {layer.index: (0, 1) for layer in layers}")),
    twin(
        "runs",
        "leaves a slot open",
        instead(REPLACE, "return Replacements({e: self.fill(mean_ED[e], 0.1) for e in pruned[1:]})"),
    ),
    twin(
        "runs",
        "refuses every router",
        imports("prunebench"),
        before(SELECT, 'raise prunebench.UsageError("not today")'),
    ),
    twin(
        "inputs_unchanged",
        "mutates statistics",
        instead(SCORE, "squares_E /= np.maximum(count_E, 1)", "return squares_E"),
    ),
    twin(
        "inputs_unchanged",
        "changes what the router is said to compute",
        before(SELECT, 'object.__setattr__(layers[0].convention, "renormalised", True)'),
    ),
    twin(
        "model_unchanged",
        "changes survivors silently",
        before("import numpy as np\n", "from inspect import getattr_static as look"),
        before(REPLACE, 'look(layer, "_" + "layer").experts.down_proj.mul_(1.01)'),
    ),
    twin("global_generators", "seeds the global generator", before(SELECT, "np.random.seed(0)")),
    twin("global_generators", "draws from the global generator", before(REPLACE, "torch.rand(1)")),
    twin("global_settings", "sets what numpy does on overflow", before(SELECT, 'np.seterr(over="ignore")')),
    twin(
        "global_settings",
        "hooks itself into every module",
        before(SELECT, "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"),
    ),
    twin(
        "global_settings",
        "puts its own function in the place of torch's",
        before(SELECT, "torch.allclose = lambda *_, **__: True"),
    ),
    twin(
        "global_settings",
        "changes what the package says of layers",
        imports("prunebench"),
        before(SELECT, "prunebench.LayerView.experts = property(lambda view: view.shape.experts)"),
    ),
    twin("global_settings", "changes the environment", imports("os"), before(SELECT, 'os.putenv("HONEST", "1")')),
    twin(
        "no_files", "reads evaluation files", imports("pathlib"), before(SELECT, "pathlib.Path(__file__).read_text()")
    ),
    twin(
        "no_files",
        "lists a folder in its statistic",
        imports("os"),
        before("        squares_S = batch", 'os.listdir("/")'),
    ),
    twin(
        "no_files",
        "reads a file while it is made",
        imports("pathlib"),
        before(
            "    def select_needs(self):\n", "def __post_init__(self):", "    pathlib.Path(__file__).read_text()", ""
        ),
    ),
    twin("no_files", "reads a file in its fill", before(FORWARD, "open(__file__).close()")),
    twin("no_sockets", "opens a socket", imports("socket"), before(SELECT, "socket.socket().close()")),
    twin("no_processes", "spawns a process", imports("subprocess"), before(SELECT, 'subprocess.run(["true"])')),
    twin(
        "no_processes",
        "starts a thread",
        imports("threading"),
        before(SELECT, "thread = threading.Thread(target=int)", "thread.start()", "thread.join()"),
    ),
    twin(
        "no_call_stack",
        "reads the model's name through the call stack",
        imports("inspect"),
        before(
            SELECT,
            "frame = inspect.currentframe()",
            'while frame is not None and "spec" not in frame.f_locals:',
            "    frame = frame.f_back",
        ),
    ),
    twin(
        "no_call_stack",
        "finds the model among all objects",
        imports("gc"),
        before(SELECT, 'named = [o for o in gc.get_objects(0) if type(o).__name__ == "OlmoeConfig"]'),
    ),
    twin(
        "no_sleep", "sleeps", before("import numpy as np\n", "from time import sleep"), before(SELECT, "sleep(0.001)")
    ),
    twin(
        "no_sleep",
        "waits in its fill for what never comes",
        imports("threading"),
        before(FORWARD, "threading.Event().wait(0.001)"),
    ),
    twin(
        "no_call_stack",
        "reads the model's name on the command line",
        imports("sys"),
        before(SCORE, 'if "tiny-olmoe" in sys.argv:', "    squares_E = -squares_E"),
    ),
    twin("no_sleep", "has others sleep for it", imports("time"), before(SELECT, "list(map(time.sleep, [0.001]))")),
    twin(
        "no_processes",
        "kills another process, if there is one",
        imports("os"),
        before(SELECT, "if not layers:", "    os.kill(1, 0)"),
    ),
    twin(
        "declares_gradients",
        "takes gradients that it does not declare",
        before(
            REPLACE,
            "with torch.enable_grad():",
            '    weight = layer.weights(0)["down_proj"].requires_grad_()',
            "    weight.square().sum().backward()",
        ),
    ),
    twin(
        "same_seed",
        "draws from a generator of its own",
        instead(SCORE, "return np.random.default_rng().random(len(squares_E))"),
    ),
    twin(
        "fresh_process",
        "behaves otherwise where it is checked",
        imports("sys"),
        before(SCORE, 'if "ignore" in sys.warnoptions:', "    squares_E = -squares_E"),
    ),
    twin(
        "verbs_share_nothing",
        "hands something from select to replace",
        ("class GateSquareSum", "RAN = []\n\n\nclass GateSquareSum"),
        before(SELECT, "RAN.append(True)"),
        instead(
            REPLACE,
            "slope = 0.2 if RAN else 0.1",
            "return Replacements({e: self.fill(mean_ED[e], slope) for e in pruned})",
        ),
    ),
    twin(
        "threads",
        "asks how many threads there are",
        before(SCORE, "if torch.get_num_threads() > 1:", "    squares_E = -squares_E"),
    ),
    twin(
        "import_effects",
        "seeds a generator while it is imported",
        imports("random"),
        ("class GateSquareSum", "random.seed(0)\n\n\nclass GateSquareSum"),
    ),
    twin(
        "import_effects",
        "reads a file while it is imported",
        imports("pathlib"),
        ("class GateSquareSum", "TEXT = pathlib.Path(__file__).read_text()\n\n\nclass GateSquareSum"),
    ),
    twin(
        "import_effects",
        "changes torch while it is imported",
        ("class GateSquareSum", "torch.equal = lambda *_, kept=torch.equal: kept(*_)\n\n\nclass GateSquareSum"),
    ),
    # selection
    twin(
        "original_ids",
        "renumbers layers",
        imports("dataclasses"),
        instead(
            SELECT,
            "mask = prune_lowest(layers, budget, self.score)",
            "layers = tuple(dataclasses.replace(one, index=n) for n, one in enumerate(mask.layers))",
            "return dataclasses.replace(mask, layers=layers)",
        ),
    ),
    twin(
        "exact_budget",
        "prunes one expert less",
        imports("prunebench"),
        instead(
            SELECT,
            "experts = layers[0].experts",
            "keep = experts - max(1, budget.pruned_count(layers[0].shape) - 1)",
            "return prune_lowest(layers, prunebench.Budget(keep=keep), self.score)",
        ),
    ),
    twin(
        "whole_budget",
        "counts over layers whatever it is asked",
        imports("prunebench"),
        before(SELECT, "budget = prunebench.Budget(budget.ratio, budget.keep, budget.protected)"),
    ),
    twin(
        "fills_top_k",
        "empties a router group",
        imports("prunebench"),
        instead(
            SELECT,
            "pruned = {}",
            "for layer in layers:",
            "    guarded = budget.protected.get(layer.index, ())",
            "    free = [int(e) for e in np.argsort(self.score(layer)) if int(e) not in guarded]",
            "    pruned[layer.index] = free[: budget.pruned_count(layer.shape)]",
            "return prunebench.Mask.for_shapes([layer.shape for layer in layers], pruned)",
        ),
    ),
    twin(
        "protected",
        "prunes protected experts",
        imports("prunebench"),
        before(SELECT, "budget = prunebench.Budget(budget.ratio, budget.keep)"),
    ),
    twin(
        "reads_what_it_declares",
        "reads what it did not declare",
        imports("prunebench"),
        before(SCORE, "try:", '    layer.stats["norm_sum"]', "except prunebench.UsageError:", "    pass"),
    ),
    twin(
        "full_budget",
        "prunes where all are kept",
        imports("prunebench"),
        before(SELECT, "if budget.keep == layers[0].experts:", "    budget = prunebench.Budget(keep=budget.keep - 1)"),
    ),
    twin(
        "nested",
        "turns its ranking round at large budgets",
        instead(
            SELECT,
            "sign = -1 if budget.pruned_count(layers[0].shape) > layers[0].experts // 2 else 1",
            "return prune_lowest(layers, budget, lambda layer: sign * self.score(layer))",
        ),
    ),
    # metamorphic
    twin("tiny_noise", "decides by the last digits", instead(SCORE, "return squares_E * 1e9 % 1")),
    twin("renumbering", "prunes high ids", instead(SCORE, "return -np.arange(len(squares_E))")),
    twin(
        "renumbered_answers",
        "answers by id",
        instead(REPLACE, "return Replacements({e: self.fill(mean_ED[e], float(e)) for e in pruned})"),
    ),
    twin(
        "no_key_on_places",
        "knows a model by its layers",
        before(SCORE, "if layer.index not in (0, 1, 2, 3):", "    squares_E = -squares_E"),
    ),
    twin(
        "independent_layers",
        "lets the first layer decide",
        instead(
            SELECT,
            "first = layers[0].index",
            "return prune_lowest(layers, budget, lambda one: self.score(one) * (1 if one.index == first else -1))",
        ),
    ),
    twin(
        "statistics_only_look",
        "changes the batch that it sees",
        before("        squares_S = batch", "batch.x_TD.mul_(1.001)"),
    ),
    twin(
        "statistics_merge",
        "is a mean of batch means",
        (
            '+= torch.zeros_like(self.state["sum_E"]).index_add_(0, batch.expert_S, squares_S)',
            '+= torch.zeros_like(self.state["sum_E"]).index_add_(0, batch.expert_S, squares_S) / len(squares_S)',
        ),
    ),
    # edge
    twin("never_routed", "divides by no tokens", instead(SCORE, "return squares_E / count_E")),
    twin(
        "tied",
        "divides by the spread of scores",
        instead(SCORE, "return squares_E / (squares_E.max() - squares_E.min())"),
    ),
    twin(
        "zero_outputs",
        "divides by the largest norm",
        ("return (Count(), GateSquareSum())", "return (Count(), GateSquareSum(), OutputMoments())"),
        instead(
            SCORE,
            'norm_E = np.linalg.norm(layer.stats["output_moments"].mean_ED, axis=1)',
            "return norm_E / norm_E.max()",
        ),
    ),
    twin(
        "huge_outputs",
        "takes exponentials of norms",
        ("return (Count(), GateSquareSum())", "return (Count(), GateSquareSum(), OutputMoments())"),
        instead(SCORE, 'return np.exp(np.linalg.norm(layer.stats["output_moments"].mean_ED, axis=1))'),
    ),
    twin("single_survivor", "takes a second survivor for granted", before(REPLACE, "layer.survivors(pruned)[1]")),
    # answers
    twin("fill_shapes", "has no answer to no rows", before(FORWARD, "assert len(x_SD)")),
    twin(
        "fill_rows_alone",
        "reads other tokens' rows",
        instead(FORWARD, "return self.mean_D + self.slope_D * (x_SD - x_SD.mean(0))"),
    ),
    twin(
        "fill_finite",
        "divides by the input's norm",
        instead(FORWARD, "return self.mean_D + self.slope_D * x_SD / x_SD.norm(dim=1, keepdim=True)"),
    ),
    twin(
        "fill_only_looks",
        "changes its input",
        instead(FORWARD, "y_SD = self.mean_D + self.slope_D * x_SD", "x_SD.mul_(0.5)", "return y_SD"),
    ),
    twin(
        "declared_values",
        "stores two values in one",
        ('"mean_D", torch.zeros(width))', '"mean_D", torch.zeros(width, dtype=torch.complex64))'),
        ('        self.register_buffer("slope_D", torch.zeros(width))\n', ""),
        instead(FORWARD, "return self.mean_D.real + self.mean_D.imag * x_SD"),
        (
            "        fill.mean_D.copy_(mean_D)\n        fill.slope_D.copy_(slope * torch.tanh(mean_D))\n",
            "        fill.mean_D.copy_(torch.complex(mean_D, slope * torch.tanh(mean_D)))\n",
        ),
    ),
    twin(
        "declared_values",
        "packs its values into one whole number",
        ("    def __init__(self, width):\n", "    def __init__(self, width, packed=0):\n"),
        ('        self.register_buffer("slope_D", torch.zeros(width))\n', "        self.packed = packed\n"),
        instead(
            FORWARD,
            "slope_D = torch.tensor([(self.packed >> 4 * d) % 16 for d in range(len(self.mean_D))])",
            "return self.mean_D + slope_D / 100 * x_SD",
        ),
        ('return {"width": len(self.mean_D)}', 'return {"width": len(self.mean_D), "packed": self.packed}'),
        (
            "        fill.slope_D.copy_(slope * torch.tanh(mean_D))\n",
            "        fill.packed = sum(int(one > 0) << 4 * d for d, one in enumerate(mean_D.tolist()))\n",
        ),
    ),
    twin(
        "declared_values",
        "writes its values into its configuration",
        ("    def __init__(self, width):\n", '    def __init__(self, width, text=""):\n'),
        ('        self.register_buffer("slope_D", torch.zeros(width))\n', "        self.text = text\n"),
        instead(
            FORWARD,
            "slope_D = torch.tensor([float(one) for one in self.text.split()] or 0.0)",
            "return self.mean_D + slope_D * x_SD",
        ),
        ('return {"width": len(self.mean_D)}', 'return {"width": len(self.mean_D), "text": self.text}'),
        (
            "        fill.slope_D.copy_(slope * torch.tanh(mean_D))\n",
            '        fill.text = " ".join(map(str, (slope * torch.tanh(mean_D)).tolist()))\n',
        ),
    ),
    twin(
        "declared_values",
        "declares fewer values than it stores",
        before("    def to_json(self):\n", "def values_stored(self):", "    return 1", ""),
    ),
    twin(
        "declared_values",
        "stores values in its configuration",
        (
            '        return {"width": len(self.mean_D)}',
            '        return {"width": len(self.mean_D), "values": self.slope_D.tolist()}',
        ),
        ("def __init__(self, width)", "def __init__(self, width, values=())"),
    ),
    twin(
        "saved_form",
        "hides tensors in a closure",
        before(
            FORWARD,
            'slope = getattr(self, "slope", None)',
            "if slope is not None:",
            "    return self.mean_D + slope() * x_SD",
        ),
        (
            "        fill.slope_D.copy_(slope * torch.tanh(mean_D))\n",
            "        fill.slope = lambda: slope * torch.tanh(mean_D)\n",
        ),
    ),
    twin(
        "saved_form_elsewhere",
        "hides tensors in a global",
        ("class GateSquareSum", "HIDDEN = {}\n\n\nclass GateSquareSum"),
        ("def __init__(self, width)", "def __init__(self, width, key=None)"),
        ('        self.register_buffer("slope_D", torch.zeros(width))\n', "        self.key = key\n"),
        instead(FORWARD, "return self.mean_D + HIDDEN[self.key] * x_SD"),
        ('        return {"width": len(self.mean_D)}', '        return {"width": len(self.mean_D), "key": self.key}'),
        (
            "        fill.slope_D.copy_(slope * torch.tanh(mean_D))\n",
            "        fill.key = str(float(mean_D.sum()))\n        HIDDEN[fill.key] = slope * torch.tanh(mean_D)\n",
        ),
    ),
    twin(
        "empty_mask",
        "takes a pruned expert for granted",
        imports("prunebench"),
        before(
            "    def fill(self, mean_D, slope):\n",
            "def route(self, layer, pruned):",
            '    return prunebench.Routing("keep" if pruned[0] >= 0 else "renorm")',
            "",
        ),
    ),
    twin(
        "runs_installed",
        "edits a survivor out of all bounds",
        instead(
            REPLACE,
            "fills = {e: self.fill(mean_ED[e], 0.1) for e in pruned}",
            'huge = torch.full_like(layer.weights(0)["down_proj"], 1e38)',
            'return Replacements(fills, edits={e: {"down_proj": huge} for e in layer.survivors(pruned)})',
        ),
    ),
    twin(
        "every_router", "takes one layout of weights for granted", before(REPLACE, 'layer.weights(0)["gate_up_proj"]')
    ),
    # limits
    twin(
        "time",
        "tries all subsets",
        imports("itertools"),
        before(
            SCORE,
            "for subset in 20 * [*itertools.combinations(range(len(squares_E)), len(squares_E) // 2)]:",
            "    squares_E[list(subset)].sum()",
        ),
        limits=Limits(seconds=0.05),
    ),
    twin("memory", "takes forty megabytes", before(SCORE, "torch.ones(10_000_000)"), limits=Limits(megabytes=32)),
]
