"""The training text: the six novels of Jane Austen, read from a Debian package that is not installed.

The package is r-cran-janeaustenr 1.0.0-1 (MIT; the novels are in the public domain). Inside it, Rdata.rdb
is a sequence of records. A record is a 4-byte big-endian length of the unpacked data, then either one
letter ("Z": raw LZMA2, "2": bzip2) and that stream, or a zlib stream. Unpacked, it is R's XDR
serialisation, in which every string is a CHARSXP: a flag word whose low byte is 9, a big-endian length (-1
is NA), and the bytes. A novel is one long vector of lines.
"""

import bz2
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from data.errors import BadInput

SHA256 = "ae4140c6e5ab543cc81f68358120258f0935ac9e27a30f44a7a564b349307867"  # of the whole training text
HOW_TO_GET = (
    "it is made from the Debian package r-cran-janeaustenr 1.0.0-1 (`apt-get download r-cran-janeaustenr`, or"
    " take the .deb from any Debian mirror): `python -m capture.training corpus THAT.deb austen.txt`"
)
DATABASE = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVEL = 200  # a record of more strings than this is a novel
LONGEST_LINE = 4000  # bytes; a longer "string" is a chance match of the flag word
NOT_A_FLAG = 0x200000  # R sets no flag bits from here on for a string


def read_corpus(deb: Path) -> str:
    """The six novels, one after the other, as the package has them.

    Raises BadInput if the file is not that Debian package.
    """
    try:
        database = _database(deb.read_bytes())
    except OSError as error:
        raise BadInput(f"{deb}: cannot be read ({error.strerror}); {HOW_TO_GET}") from error
    except (KeyError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        raise BadInput(f"{deb}: no {DATABASE} in it ({error}); {HOW_TO_GET}") from error
    novels = [lines for data in _records(database) if len(lines := _strings(data)) > NOVEL]
    return "\n\n".join("\n".join(lines) for lines in novels)


def _database(deb: bytes) -> bytes:
    """Rdata.rdb out of a .deb, which is an ar archive that holds a compressed tar archive.

    An ar archive is a magic line, then members: a 60-byte header (name in its first 16 bytes, decimal size
    in bytes 48 to 57), and the data, padded to an even length.
    """
    if not deb.startswith(b"!<arch>\n"):
        raise ValueError("not a Debian package")
    at = 8
    while at + 60 <= len(deb):
        name, size = deb[at : at + 16].decode("ascii").strip(), int(deb[at + 48 : at + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(deb[at + 60 : at + 60 + size])) as archive:
                member = archive.extractfile(DATABASE)
                if member is None:
                    raise ValueError("not a plain file")
                return member.read()
        at += 60 + size + size % 2
    raise ValueError("no data archive")


def _records(raw: bytes) -> Iterator[bytes]:
    """Unpacked data of each record of an R lazy-load database."""
    at = 0
    while at + 5 < len(raw):
        kind, body = raw[at + 4 : at + 5], raw[at + 5 :]
        if kind == b"Z":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            xz = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
            data, rest = xz.decompress(body), xz.unused_data
        elif kind == b"2":
            bzip = bz2.BZ2Decompressor()
            data, rest = bzip.decompress(body), bzip.unused_data
        else:
            inflate = zlib.decompressobj()
            data, rest = inflate.decompress(raw[at + 4 :]), inflate.unused_data
        yield data
        at = len(raw) - len(rest)


def _strings(data: bytes) -> list[str]:
    """Every CHARSXP of an XDR serialisation, in order; bytes that are not part of one are stepped over."""
    found = []
    at = 0
    while at + 8 <= len(data):
        flags, length = struct.unpack(">Ii", data[at : at + 8])
        if flags & 0xFF == 9 and flags < NOT_A_FLAG:
            if length == -1:
                found.append("")
                at += 8
                continue
            if 0 <= length < LONGEST_LINE and at + 8 + length <= len(data):
                try:
                    found.append(data[at + 8 : at + 8 + length].decode("utf-8"))
                except UnicodeDecodeError:
                    pass  # a chance match: step on
                else:
                    at += 8 + length
                    continue
        at += 1
    return found
