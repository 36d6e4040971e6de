"""Running arms: one at a time (`run`), or a track of them (`grid`), each to a verified run folder."""

from prunebench.run.grid import GridResult, grid, prepare_all
from prunebench.run.session import Outcome, Session, run
from prunebench.run.spec import ArmSpec
from prunebench.run.track import Track, read_track

__all__ = ["ArmSpec", "GridResult", "Outcome", "Session", "Track", "grid", "prepare_all", "read_track", "run"]
