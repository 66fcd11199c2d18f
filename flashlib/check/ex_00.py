"""Chapter 00: one warm-up, so that the reader meets the checker before it matters."""

from flashlib.check import Exercise, Wrong

EXERCISES = [
    Exercise(
        id="00.1",
        title="The bytes of S",
        level=1,
        task=(
            "A model has 16 heads and head_dim 128, and reads one sequence of 32,768 tokens in bfloat16. The textbook "
            "form of attention writes one matrix $S$ for each head. How many **bytes** do the 16 matrices take "
            "together?"
        ),
        name="score_bytes",
        stub="score_bytes = None\n",
        solution="score_bytes = 16 * 32768 * 32768 * 2\n",
        # A number worked out by hand may be rounded to two digits.
        rtol=0.02,
        wrong=(
            Wrong("one head is counted and there are 16", edit=("16 * ", "")),
            Wrong("the numbers are counted and not their bytes (bfloat16 has two)", edit=(" * 2", "")),
            Wrong("a number has four bytes, as in float32; bfloat16 has two", edit=(" * 2", " * 4")),
            Wrong(
                "S has a row for each token and head_dim columns: that is the size of Q; S has a column for each key",
                edit=("32768 * 32768", "32768 * 128"),
            ),
            Wrong("head_dim is counted too; it is summed over when S is computed", edit=(" * 2", " * 2 * 128")),
            Wrong("the answer is in gigabytes; bytes are asked for", edit=(" * 2", " * 2 / 1e9")),
            Wrong("the answer is in GiB (1024³ bytes); bytes are asked for", edit=(" * 2", " * 2 / 1024**3")),
        ),
    ),
]
