"""How close does each method come to the ideal at a budget? The benchmark goes on where it stopped.

``python -m benchmarks.fractions run --results FILE.json --budgets 75,60 --methods tiers:auto,checkpoint --seconds 600``
``python -m benchmarks.fractions show FILE.json --markdown``
``python -m benchmarks.fractions merge benchmarks/data/fractions.json FILE.json --newest``
``python -m benchmarks.fractions largest --results FILE.json --methods pages:auto,checkpoint-k``

A cell is a workload, a budget and a method, on one machine and for one state of the code. The ideal, which is the plain
program with unlimited HBM, runs right before and right after each method; the fraction is the ratio of the two.
"""
