"""Pretrain BERT: `python run_pretraining.py --config configs/bert_large_phase1.yaml --data.path DIR --train.output_dir RUN`."""

from pretrain.command import main

if __name__ == "__main__":
    main()
