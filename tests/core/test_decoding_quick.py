import copy, torch, pytest
from transformers import LlamaConfig, LlamaForCausalLM
from pipeline.core.decoding import DecodeConfig, decode
def tiny(seed=0,std=0.35,vocab=100,layers=2):
    torch.manual_seed(seed)
    c=LlamaConfig(vocab_size=vocab,hidden_size=64,intermediate_size=128,num_hidden_layers=layers,num_attention_heads=4,num_key_value_heads=2,initializer_range=std,max_position_embeddings=512)
    return LlamaForCausalLM(c).eval()
def oracle(m,p,n):
    ids=list(p)
    with torch.inference_mode():
        for _ in range(n): ids.append(m(torch.tensor([ids]),use_cache=False).logits[0,-1].argmax().item())
    return ids[len(p):]
@pytest.mark.parametrize("std",[0.02,0.35])
def test_greedy(std):
    t=tiny(std=std); prompts=[[5],[3,4],list(range(7)),list(range(50))]
    gold=[oracle(t,p,40) for p in prompts]
    noisy=copy.deepcopy(t)
    for p in noisy.parameters():
        if p.dim()>1: p.data+=torch.randn_like(p)*p.std()*0.02
    for k in (1,2,4,8):
        for d in (None,copy.deepcopy(t),noisy,tiny(1)):
            r=decode(t,d,prompts,DecodeConfig(draft_length=k,max_new_tokens=40))
            assert [s.token_ids for s in r.sequences]==gold
            print(std,k,r.stats)
