"""Write ``grades.csv`` anew from a graded folder: ``write_expected.py OUT/grades.csv``; read the
difference before it is committed."""

import csv
import io
import sys
from pathlib import Path

from folder_of_submissions import GOLDEN, lasting

rows = csv.DictReader(io.StringIO(Path(sys.argv[1]).read_text(encoding="utf-8-sig")))
found = [lasting(row) for row in rows]
out = io.StringIO()
writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
writer.writeheader()
writer.writerows(found)
GOLDEN.write_text(out.getvalue(), encoding="utf-8")
