"""`python -m peer`: run one peer."""

import sys

from peer.cli import main

sys.exit(main())
