"""prepare: prompts out of the team's documents.

Reads:  the sources named in `domain.sources` (files, installed packages, the standard library, Hugging Face data sets).
Writes: data/prompts/{train,dev,golden}.parquet, data/prompts/stats.json.
Does:   clusters near-duplicates, splits by cluster, cuts prompts, drops held-out prompts that share words with train.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import List

import hydra
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.adapters.near_duplicates import cluster_documents
from pipeline.adapters.sources import SourceConfig, read_documents
from pipeline.core.artifacts import atomic_path, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.prompts import SPLITS, Prompt, PromptConfig, build_prompts, prompt_statistics
from pipeline.stage import execute, input_path, output_path, write_effective_config

COLUMNS = ("prompt_id", "domain", "source", "document_id", "cluster", "task", "text", "messages", "title")


@dataclass
class DomainConfig(PromptConfig):
    sources: List[SourceConfig]
    near_duplicate_similarity: float  # Jaccard over word 5-grams, 0 to 1: from it on, documents share a cluster

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = {domain for split in SPLITS for domain in getattr(self.prompts, split)}
        offered = {source.domain for source in self.sources}
        if taken := wanted & {"all", "each"}:
            raise PipelineError(
                f"A domain cannot be called {taken.pop()!r}.", "the word stands for all domains: choose another."
            )
        if wanted != offered:
            raise PipelineError(
                f"domain.sources offers {sorted(offered)}, domain.prompts asks for {sorted(wanted)}.",
                "name the same domains in both.",
            )
        missing = [split for split in SPLITS if not getattr(self.prompts, split).get(self.name)]
        if missing:
            raise PipelineError(
                f"domain.prompts asks for no {', '.join(missing)} prompts of the target domain {self.name!r}.",
                f"name the target domain in domain.name, or give it prompts in domain.prompts.{missing[0]}.",
            )


@dataclass
class Config:
    domain: DomainConfig
    seed: int


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist([prompt.row() for prompt in prompts], schema), path)


def run(config: Config) -> None:
    documents = read_documents(config.domain.sources, input_path(""))
    texts = {document.document_id: document.text for document in documents}
    clusters = cluster_documents(texts, config.domain.near_duplicate_similarity)
    splits = build_prompts(documents, clusters, config.domain, config.seed)
    statistics = prompt_statistics(documents, clusters, config.domain, splits)
    with atomic_path(output_path("data/prompts")) as directory:
        directory.mkdir()
        for split, prompts in splits.prompts.items():
            write_prompts(directory / f"{split}.parquet", prompts)
        write_json(directory / "stats.json", "domain-draft/prompts", 1, statistics)
        write_effective_config(directory, config)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
