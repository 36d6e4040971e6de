"""Pruning against quantizing at matched storage: `python -m leaderboard.matched RECORDS --out docs/results`.

Tables of the shape of 2610.41366 App. F.2 to F.5 from the records of the tracks `tiny` (16 bits) and `matched`, and
accuracy against stored bytes with its Pareto front. Every number is of the records.
"""
