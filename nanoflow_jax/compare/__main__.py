import sys

from nanoflow_jax.compare.command import main

sys.exit(main())
