"""What the Kelle paper prints and is recomputed here, as in its tables."""

from __future__ import annotations

PAPER = {
    "title": "Kelle: Co-design KV Caching and eDRAM for Efficient LLM Serving in Edge Computing",
    "authors": "T. Xia, S. Q. Zhang",
    "published": "MICRO 2025",
    "doi": "10.1145/3725843.3756071",
}

AVERAGED = ("llama2-7b", "llama2-13b", "llama3.2-3b")
"""Models that the averages of section 8.1 are taken over here: those of tables 7 to 9. The paper's are in figure 13."""
TASKS = ("LA", "TQ", "QP", "PG19")

TABLE7: dict[str, dict[int, float]] = {  # PG19: N' to energy efficiency
    "llama3.2-3b": {2048: 8.07, 3500: 6.89, 5250: 5.77, 7000: 5.13, 8750: 4.55},
    "llama2-13b": {2048: 5.06, 3500: 4.62, 5250: 4.02, 7000: 3.46, 8750: 3.11},
}
TABLE8: dict[str, dict[int, float]] = {  # LLaMA3.2-3B: mean interval (us) to energy efficiency
    "TQ": {1050: 3.91, 525: 3.65, 131: 3.06},
    "PG19": {1050: 8.07, 525: 7.31, 131: 6.05},
}
TABLE9: dict[int, dict[str, float]] = {  # LLaMA2-7B, PG19: batch to energy efficiency
    16: {"AEP+SRAM": 3.16, "AERP+SRAM": 4.33, "Kelle+eDRAM": 6.67},
    4: {"AEP+SRAM": 1.71, "AERP+SRAM": 1.81, "Kelle+eDRAM": 2.23},
    1: {"AEP+SRAM": 1.24, "AERP+SRAM": 1.36, "Kelle+eDRAM": 1.71},
}
# 8.3.7: efficiency of Kelle+eDRAM with half the eDRAM bandwidth, against AERP+SRAM and Original+SRAM
HALF_BANDWIDTH: dict[str, tuple[float, float]] = {"PG19": (1.47, 6.31), "TQ": (1.35, 5.42)}

OWN = "on a small model of your own: llmcache edram accuracy"
NOT_RECOMPUTED: tuple[tuple[str, str, str], ...] = (  # where, what it holds, why it is not recomputed
    ("table 2", "perplexity and accuracy of seven models on eight data sets", "needs the models and data sets"),
    (
        "table 3",
        "accuracy of LLaMA2-7B over N' (its row A-e is blank)",
        f"needs the model and data sets; {OWN} --experiment budgets",
    ),
    (
        "table 4",
        "accuracy over refresh intervals",
        f"needs the model (intervals are judged above); {OWN} --experiment intervals",
    ),
    ("tables 5, 6", "ROUGE-1, truthfulness and bias scores; accuracy with 4-bit weights", "needs the models and data sets"),
    ("figure 4", "failure rate over the refresh interval", "an image: the text has no number of it"),
    (
        "figure 8",
        "perplexity over bit-flip rates; the text: below 1e-3 it rises by less than 0.1",
        f"needs LLaMA2-7B; {OWN} --experiment uniform,sided",
    ),
    ("figure 13", "speed-up and efficiency by model and task, energy pies", "an image: its averages are judged above"),
    ("figure 14", "against LLM.npu, DynaX, COMET and Jetson Orin", "an image; systems of others, partly measured"),
    ("8.3.2", "over 86 % of the popular tokens stay popular", "needs the models and data sets"),
)
"""Everything with numbers that this reproduction does not recompute."""
