"""Programs with other people's trainers, as their users write them: none imports torch-tiers.

``python -m tests.trainers.NAME FOLDER`` trains a small Llama of random weights on a CPU, with no download. It prints
each loss, and at the end a hash of the weights. FOLDER, which is there and empty, takes what the trainer writes.
"""
