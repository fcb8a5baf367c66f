"""Which installed packages may be trained on: those with a permissive licence in their metadata."""

import re
from importlib.metadata import Distribution

PERMISSIVE = {
    "MIT": r"\bMIT\b|\bMIT-0\b|\bExpat\b",
    "BSD": r"\bBSD\b|\b0BSD\b|BSD-[23]-Clause|Redistribution and use in source and binary forms",
    "Apache-2.0": r"\bApache\b",
    "PSF-2.0": r"\bPSF\b|Python Software Foundation|Python-2\.0",
    "ISC": r"\bISC\b|\bISCL\b",
    "HPND": r"\bHPND\b",
    "Unlicense": r"\bUnlicense\b|\bCC0\b",
    "ZPL-2.1": r"\bZope Public\b|\bZPL\b",
}
REFUSED = re.compile(
    r"\b[AL]?GPL|General Public|Lesser General|\bMPL\b|Mozilla|\bEPL\b|Eclipse|\bCC[- ]BY|"
    r"Creative Commons|Propriet|NVIDIA|Commercial|CDDL|EULA|\bNC\b|Non-?Commercial|Artistic",
    re.IGNORECASE,
)
LONGEST_NAME = 400  # characters; some packages put the whole licence text into the field


def licence_statement(distribution: Distribution) -> str:
    """The metadata's SPDX expression, licence field and classifiers."""
    metadata = distribution.metadata
    classifiers = [
        value.removeprefix("License :: ").removeprefix("OSI Approved :: ")
        for value in metadata.get_all("Classifier") or []
        if value.startswith("License ::")
    ]
    fields = [metadata[name] for name in ("License-Expression", "License") if name in metadata]
    return " | ".join(text[:LONGEST_NAME] for text in [*fields, *classifiers] if text.strip())


def permissive_licence(statement: str) -> str | None:
    """The permissive licence that a statement names, or None (unknown, copyleft, proprietary).

    One refused word anywhere is enough for None: a package under two licences is left out.
    """
    if REFUSED.search(statement):
        return None
    names = [name for name, pattern in PERMISSIVE.items() if re.search(pattern, statement)]
    return " and ".join(names) or None
