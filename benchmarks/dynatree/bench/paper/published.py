"""The figures of the papers' tables, by version and table, as they print them."""

from __future__ import annotations

from collections.abc import Mapping

Figures = Mapping[tuple[str, str], Mapping[str, str]]  # by data set and row of the paper: the figure of each column


def _figures(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """Parse a heading and lines `data set | row | figure | ...`."""
    heading, *lines = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    return {(line[0], line[1]): dict(zip(heading[2:], line[2:], strict=True)) for line in lines}


# Tables 1 to 3 of 000, 001 and 003.
_MAIN = _figures("""
data set   | row      | tokens/s     | speedup | TTFT ms    | TPOT ms     | Accept. | L-bar | l-bar | #Iter.
wikitext-2 | AR       | 133.4 ± 0.5  | 1.00    | 18.9 ± 6.1 | 7.48 ± 0.02 | -       | 1.00  | -     | 1500
wikitext-2 | Linear   | 196.1 ± 37.8 | 1.47    | 14.6 ± 4.0 | 5.32 ± 1.24 | 88.2 %  | 6.82  | 7.05  | 220
wikitext-2 | Fixed    | 200.7 ± 41.7 | 1.50    | 14.6 ± 4.2 | 5.30 ± 1.63 | 71.0 %  | 6.79  | 7.10  | 221
wikitext-2 | DynaTree | 219.5 ± 22.2 | 1.64    | 14.4 ± 4.0 | 4.59 ± 0.47 | 102.2 % | 7.08  | 7.15  | 212
pg-19      | AR       | 114.8 ± 20.6 | 1.00    | 21.8 ± 8.7 | 9.00 ± 1.69 | -       | 1.00  | -     | 1500
pg-19      | Linear   | 144.9 ± 28.6 | 1.26    | 11.1 ± 3.3 | 7.17 ± 1.42 | 92.5 %  | 4.56  | 4.63  | 329
pg-19      | Fixed    | 185.5 ± 33.2 | 1.62    | 9.7 ± 0.4  | 5.55 ± 0.95 | 64.3 %  | 6.20  | 6.43  | 242
pg-19      | DynaTree | 194.9 ± 35.6 | 1.70    | 9.6 ± 0.6  | 5.30 ± 1.02 | 92.2 %  | 6.17  | 6.45  | 243
""")
_MAIN_002 = _figures("""
data set   | row      | tokens/s     | speedup | TTFT ms    | TPOT ms     | Accept. | L-bar | l-bar | #Iter.
wikitext-2 | AR       | 132.8 ± 0.7  | 1.00    | 18.9 ± 6.1 | 7.52 ± 0.04 | -       | 1.00  | -     | 1500
wikitext-2 | Linear   | 169.1 ± 19.1 | 1.27    | 14.9 ± 4.0 | 5.98 ± 0.65 | 97.7 %  | 4.84  | 4.88  | 310
wikitext-2 | Fixed    | 188.0 ± 16.5 | 1.42    | 15.0 ± 3.9 | 5.35 ± 0.50 | 82.6 %  | 5.75  | 5.78  | 261
wikitext-2 | DynaTree | 218.5 ± 22.2 | 1.65    | 14.6 ± 4.1 | 4.61 ± 0.47 | 102.2 % | 7.08  | 7.15  | 212
pg-19      | AR       | 133.7 ± 0.7  | 1.00    | 20.0 ± 4.5 | 7.46 ± 0.04 | -       | 1.00  | -     | 1500
pg-19      | Linear   | 154.1 ± 25.4 | 1.15    | 10.5 ± 1.9 | 6.71 ± 1.42 | 92.5 %  | 4.56  | 4.63  | 329
pg-19      | Fixed    | 183.7 ± 24.8 | 1.37    | 10.4 ± 0.4 | 5.54 ± 0.75 | 82.9 %  | 5.75  | 5.80  | 261
pg-19      | DynaTree | 192.1 ± 34.2 | 1.44    | 9.9 ± 0.6  | 5.38 ± 1.03 | 92.2 %  | 6.17  | 6.45  | 243
""")
_ABLATION = _figures("""
data set   | row               | tokens/s     | speedup | delta vs fixed
wikitext-2 | Fixed             | 188.0 ± 16.5 | 1.42    | 0.0 %
wikitext-2 | + Breadth & Depth | 213.2 ± 26.1 | 1.61    | +13.4 %
wikitext-2 | + History         | 218.5 ± 22.2 | 1.65    | +16.2 %
""")
_SENSITIVITY = _figures("""
data set   | row                        | tokens/s     | speedup | Accept.
wikitext-2 | AR                         | 132.9 ± 0.5  | 1.00    | 0.0 %
wikitext-2 | (0.9, 0.4), (1, 3), (5, 8) | 217.8 ± 22.2 | 1.64    | 102.2 %
wikitext-2 | (0.9, 0.4), (1, 2), (5, 8) | 217.8 ± 34.6 | 1.64    | 100.7 %
wikitext-2 | (0.9, 0.4), (1, 4), (5, 8) | 217.7 ± 22.9 | 1.64    | 102.6 %
wikitext-2 | (0.7, 0.2), (1, 3), (5, 8) | 211.9 ± 34.1 | 1.59    | 97.8 %
wikitext-2 | (0.8, 0.3), (1, 3), (5, 8) | 201.6 ± 24.7 | 1.52    | 100.1 %
""")
_MEMORY = _figures("""
data set   | row      | peak MB
pg-19      | AR       | 6157.7
pg-19      | Linear   | 6360.5
pg-19      | Fixed    | 6358.3
pg-19      | DynaTree | 6359.4
wikitext-2 | AR       | 6110.0
wikitext-2 | Linear   | 6313.8
wikitext-2 | Fixed    | 6312.8
wikitext-2 | DynaTree | 6316.1
""")
_MEMORY_003 = _figures("""
data set   | row      | peak MB
pg-19      | AR       | 6156.5
pg-19      | Linear   | 6363.0
pg-19      | Fixed    | 6354.6
pg-19      | DynaTree | 6355.0
wikitext-2 | AR       | 6110.0
wikitext-2 | Linear   | 6315.3
wikitext-2 | Fixed    | 6316.9
wikitext-2 | DynaTree | 6316.4
""")


def _dyspec(text: str) -> Figures:
    """Parse lines `data set | temperature | DySpec | Sequoia | SpecInfer | AR`."""
    methods = ("DySpec", "Sequoia", "SpecInfer", "AR")
    lines = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    return {
        (data_set, f"{method}, {temperature}"): {"s/token (tokens a step)": figure}
        for data_set, temperature, *figures in lines
        for method, figure in zip(methods, figures, strict=True)
    }


PUBLISHED: Mapping[tuple[str, str], Figures] = {
    **{(version, f"table {table}"): _MAIN for version in ("000", "001", "003") for table in (1, 2, 3)},
    **{("002", f"table {table}"): _MAIN_002 for table in (1, 2, 3)},
    **{(version, "table 4"): _ABLATION for version in ("000", "001", "002", "003")},
    ("000", "table 5"): _MEMORY,
    ("001", "table 5"): _MEMORY,
    ("002", "table 5"): _SENSITIVITY,
    ("002", "table 6"): _MEMORY,
    ("003", "table 5"): _MEMORY_003,
    ("dyspec", "table 1"): _dyspec("""
        c4            | 0   | 0.00730 (5.25) | 0.00871 (4.99) | 0.01289 (3.32) | 0.02303
        c4            | 0.6 | 0.00994 (3.71) | 0.01185 (3.45) | 0.01215 (3.44) | 0.02191
        openwebtext   | 0   | 0.00960 (3.79) | 0.01001 (3.81) | 0.01489 (2.54) | 0.02191
        openwebtext   | 0.6 | 0.01096 (3.07) | 0.01206 (3.04) | 0.01262 (2.97) | 0.02634
        cnn-dailymail | 0   | 0.00926 (3.97) | 0.00936 (4.04) | 0.01464 (2.58) | 0.02246
        cnn-dailymail | 0.6 | 0.01071 (3.18) | 0.01127 (3.22) | 0.01245 (3.06) | 0.02242
    """),
    ("dyspec", "table 2"): _dyspec("""
        c4            | 0   | 0.00969 (4.98) | 0.01141 (4.35) | 0.01541 (3.14) | 0.03033
        c4            | 0.6 | 0.01245 (3.62) | 0.01505 (3.15) | 0.01527 (3.15) | 0.02824
        openwebtext   | 0   | 0.01270 (3.59) | 0.01340 (3.44) | 0.01872 (2.44) | 0.03117
        openwebtext   | 0.6 | 0.01443 (3.02) | 0.01588 (2.80) | 0.01653 (2.75) | 0.02827
        cnn-dailymail | 0   | 0.01190 (3.82) | 0.01248 (3.67) | 0.01803 (2.52) | 0.03054
        cnn-dailymail | 0.6 | 0.01385 (3.11) | 0.01527 (2.91) | 0.01581 (2.84) | 0.02812
    """),
    ("dyspec", "table 3"): _dyspec("""
        c4            | 0   | 0.53696 (9.10) | 0.88920 (6.08) | 1.14332 (4.67) | 5.59650
        c4            | 0.6 | 0.78912 (6.21) | 0.94550 (5.72) | 0.92829 (5.75) | 5.34781
        openwebtext   | 0   | 0.78106 (7.23) | 0.91815 (6.41) | 1.10449 (4.83) | 5.52462
        openwebtext   | 0.6 | 0.87547 (6.77) | 0.94224 (6.07) | 0.97772 (5.46) | 5.30340
        cnn-dailymail | 0   | 0.81716 (6.93) | 0.90751 (6.42) | 1.10608 (4.83) | 5.31049
        cnn-dailymail | 0.6 | 0.89055 (6.95) | 0.92659 (6.07) | 0.92885 (5.75) | 5.29280
    """),
    ("dyspec", "table 4"): _dyspec("""
        c4            | 0   | 0.42412 (16.04) | 0.62841 (9.40) | 0.86 (8.66) | 5.59650
        c4            | 0.6 | 0.88494 (7.14)  | 0.66293 (8.96) | 1.09 (6.93) | 5.34781
        openwebtext   | 0   | 0.54885 (11.79) | 0.62979 (9.81) | 1.02 (7.36) | 5.52462
        openwebtext   | 0.6 | 0.81002 (7.66)  | 0.65147 (9.12) | 1.21 (6.18) | 5.30340
        cnn-dailymail | 0   | 0.54739 (11.46) | 0.60206 (9.54) | 0.95 (7.87) | 5.31049
        cnn-dailymail | 0.6 | 0.87648 (7.02)  | 0.65835 (8.80) | 1.02 (6.24) | 5.29280
    """),
}

# DySpec's Table 5: number of 32 x 32 blocks in a random tree's mask, by rows: in the order of growth, and reordered.
# Appendix C.1 gives the same counts for trees of a real workload, after a prefix.
BLOCKS = {256: ("36", "22.5"), 512: ("135.5", "52.8"), 1024: ("490.2", "119.3"), 2048: ("1654.5", "278.7")}
REAL_BLOCKS = {768: ("366.12", "218.31"), 1024: ("580.07", "295.59")}
